"""Selectors choose rollouts for the loss. Each method is a file here; SHARED lists helper files."""

SHARED = ("keep",)
