"""Advantages: the weight of each rollout. Each is a file here; SHARED lists helper files."""

SHARED = ("probe",)
