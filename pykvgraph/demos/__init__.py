"""What the command line shows: passkey, dialogue, recall, a script of cells; perplexity, quality."""
