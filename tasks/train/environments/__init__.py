"""Environments: what answers the policy's turns. Each is a file here."""

SHARED = ("environment",)
