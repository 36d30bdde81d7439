"""Rollouts for people, in the terminal. Loaded by name, as the stages are."""
