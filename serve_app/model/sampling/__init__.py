"""From logits to tokens: penalties, filters, noise, and the masks of grammars."""
