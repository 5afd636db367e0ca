"""Saved cells: the format of their bytes, the files that hold them, and the way into and out of a cache."""
