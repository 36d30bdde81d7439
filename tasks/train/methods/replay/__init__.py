"""Replays choose rollouts to train on again. Each is a file here; SHARED lists helper files."""

SHARED = ("kept",)
