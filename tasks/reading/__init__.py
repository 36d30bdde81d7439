"""Prompts and rollouts as text for the terminal. Loaded by name, as the stages are."""
