"""Controls: the choice of the next prompts. Each is a file here; the other files are shared."""

SHARED = ("prompt_pool",)
