"""What a model and a context take on each device, told before anything is loaded."""
