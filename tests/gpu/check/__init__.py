"""Measurements of Winnow on a GPU, part by part, by one command."""
