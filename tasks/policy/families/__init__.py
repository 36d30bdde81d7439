"""One file per family of worked examples; the file name is the family's name in params.yaml.

A family has `PHRASES`, what all its prompts share, each of which becomes one token; `Settings`, a
frozen dataclass; and `examples(settings, seed, num_examples)`, which yields pairs (prompt,
completion)."""
