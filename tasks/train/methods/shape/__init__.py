"""One method per file. For example `overlong`: long completions lose a part of their reward."""
