"""Prefixes that texts share: blocks of tokens with the cells that hold them, and places to go on from."""
