"""A model: its file, its tokenizer, adapters, and the device that it is on."""
