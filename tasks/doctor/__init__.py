"""What can be said of a run before it: what is wrong, and what it would cost.

Loaded by name, as the stages are."""
