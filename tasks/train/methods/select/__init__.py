"""Selectors: the rollouts that enter the loss. Each is a file here; SHARED lists helper files."""

SHARED = ("keep",)
