"""One file per source; the file name is the preset's name in params.yaml.

A source module has `Settings`, a frozen dataclass of its entry's `settings`. A module that reads a
file has the setting `path` and a function `candidate(record, settings)`, which turns a record of
the file into a `Candidate`, or a `Rejection` if there is nothing to judge. A module that generates
its rows has `read(settings)`, which yields them in order."""
