"""The tokens of one sequence, from prompt to text."""
