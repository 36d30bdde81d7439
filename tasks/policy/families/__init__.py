"""One file per family of worked examples. The file name is the family's name in params.yaml.

A family has `PHRASES`, the common phrases of all its prompts, which become one token each;
`Settings`, a frozen dataclass; and `examples(settings, seed, num_examples)`, which yields pairs
(prompt, completion)."""
