"""Prompts and rollouts as text for the terminal."""
