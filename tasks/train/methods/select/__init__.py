"""Selectors: which rollouts enter the loss. Each is a file here; the others are what they share."""

SHARED = ("keep",)
