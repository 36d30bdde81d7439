"""Advantages: the weight of each rollout. Each is a file here; the other files are shared."""

SHARED = ("probe",)
