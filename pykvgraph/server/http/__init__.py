"""Connections, keys, bodies and answers, whatever is asked."""
