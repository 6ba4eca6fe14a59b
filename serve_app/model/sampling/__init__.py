"""From logits to tokens: penalties, filters, noise, and grammar masks."""
