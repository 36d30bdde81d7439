"""What a GPU makes of Winnow, measured part by part by one command."""
