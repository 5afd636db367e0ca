"""A context: batches, decoding, context shift."""
