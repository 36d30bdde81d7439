"""Controls: which prompts are sampled next. Each is a file here; the others are what they share."""

SHARED = ("prompt_pool",)
