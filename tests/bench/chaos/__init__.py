"""Faults of every kind against a small world, thousands of them, and whether anything is lost."""
