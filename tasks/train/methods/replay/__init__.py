"""Replays: rollouts that are trained on again. Each is a file here; the other files are shared."""

SHARED = ("kept",)
