"""What carries the bytes of a stream."""
