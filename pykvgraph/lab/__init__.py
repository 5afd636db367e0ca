"""Experiments on a cache: the passkey test, scripts of cell operations, the benchmark."""
