"""Where prefixes go when their cells are needed: memory, then files, each with its own bound of bytes."""
