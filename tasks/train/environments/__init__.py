"""Environments, which reply to the policy's turns. Each is a file here."""

SHARED = ("environment",)
