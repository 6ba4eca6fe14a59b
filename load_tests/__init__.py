"""Load generators, baselines and peers, and the dated log of what they measured."""
