"""How much memory a model and a context would use, and what a device can do; nothing is loaded."""
