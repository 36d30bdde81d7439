"""Controls: the choice of the next prompts. Each is a file here; SHARED lists helper files."""

SHARED = ("prompt_pool",)
