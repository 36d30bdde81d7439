"""One file per source; the file name is the preset's name in params.yaml.

A source module has `Settings`, a frozen dataclass for its entry's `settings`, and a function
`candidate(record, settings)`, which turns a record into a `Candidate`, or raises `Unusable` if the
record is unusable. A module that reads a file has the setting `path`. A module that generates its
records has `read(settings)`, which yields them in order."""
