"""Checks of a run before it starts: its faults, and its expected cost."""
