"""The cells of a cache: what is done with them, and what they hold."""
