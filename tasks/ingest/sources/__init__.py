"""One file a source; the file name is the preset's name in params.yaml.

A source module offers `Settings`, a frozen dataclass of its entry's `settings`. One that reads a
file has `path` among them and offers `candidate(record, settings)`, which turns a record of the
file into a `Candidate`, or a `Rejection` where there is nothing to judge. One that makes its rows
offers `read(settings)`, which yields them in order."""
