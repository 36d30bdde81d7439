"""Checks of a run before it starts: its faults, and its expected cost.

They are imported by name, as the stages are."""
