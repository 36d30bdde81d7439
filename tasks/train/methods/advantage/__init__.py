"""Advantages are weights of rollouts. Each method is a file here; SHARED lists helper files."""

SHARED = ("probe",)
