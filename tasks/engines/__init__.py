"""Engines sample completions. Each is a file or a folder here, and `engine.name` selects one.
SHARED lists the files that the engines have in common."""

SHARED = (
    "choosing",
    "cluster",
    "devices",
    "engine",
    "flops",
    "loading",
    "memory",
    "options",
    "settings",
    "trainers",
    "weights",
)
