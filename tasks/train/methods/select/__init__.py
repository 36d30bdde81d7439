"""Selectors: the rollouts that enter the loss. Each is a file here; the other files are shared."""

SHARED = ("keep",)
