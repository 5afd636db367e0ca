"""Text on its way to tokens and back: the tokenizer, the samplers, the stream of pieces."""
