"""What bodies ask for, parsed."""
