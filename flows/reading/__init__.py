"""Prompts and rollouts as text for the terminal. These modules are loaded by name, like stages."""
