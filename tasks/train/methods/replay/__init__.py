"""Replays: rollouts that are trained on again. Each is a file here; SHARED lists helper files."""

SHARED = ("kept",)
