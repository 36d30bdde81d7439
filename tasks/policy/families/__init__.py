"""One file per family of worked examples; the file name is the family's name in params.yaml.

A family has `INSTRUCTION`, the phrase that all its prompts share, `Settings`, a frozen dataclass,
and `examples(settings, seed, num_examples)`, which yields pairs (prompt, completion)."""
