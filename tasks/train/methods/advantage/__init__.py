"""Advantages: what a rollout weighs. Each is a file here; the others are what they share."""

SHARED = ("probe",)
