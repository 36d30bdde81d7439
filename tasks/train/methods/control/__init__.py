"""Controls choose the next prompts. Each method is a file here; SHARED lists helper files."""

SHARED = ("pilots", "prompt_pool")
