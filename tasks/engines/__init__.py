"""Engines draw completions. Each is a file or a folder here, named in `engine.name`; the others are
what they share."""

SHARED = ("choosing", "engine", "memory")
