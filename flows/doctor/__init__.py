"""Checks of a run before it starts: its faults, and its expected cost.

The modules are imported by name, as the stages are."""
