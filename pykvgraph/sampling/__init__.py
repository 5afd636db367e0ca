"""From logits to a token: samplers, grammars, limits of thoughts."""
