"""Engines sample completions. Each is a file or a folder here, named in `engine.name`; SHARED lists
the files that they have in common."""

SHARED = (
    "choosing",
    "cluster",
    "devices",
    "engine",
    "flops",
    "loading",
    "memory",
    "settings",
    "weights",
)
