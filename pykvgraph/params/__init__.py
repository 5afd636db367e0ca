"""What a user may set, each default once."""
