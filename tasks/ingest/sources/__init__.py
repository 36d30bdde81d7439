"""One file a source; the file name is the preset's name in params.yaml.

A source module offers `Settings`, a frozen dataclass of its entry's `settings`, and `read(settings)`, which yields a
`Candidate` or a `Rejection` for every row it finds, in the source's order.
"""
