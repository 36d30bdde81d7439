"""Thousands of faults of every kind in a small world, and checks that nothing is lost."""
