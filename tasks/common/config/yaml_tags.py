"""YAML files with tags, such as `!function`, read without running code."""

from pathlib import Path
from typing import Any

import yaml

from tasks.common.files import ArtifactError


class Loader(yaml.SafeLoader):
    """A YAML loader that reads tagged values as null."""


Loader.add_multi_constructor("", lambda loader, tag, node: None)  # type: ignore[no-untyped-call]


def read(path: Path) -> Any:
    """Return the values of a file. Raise ArtifactError if it is not YAML."""
    try:
        return yaml.load(path.read_bytes(), Loader)  # nosec B506  # a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path} is not YAML: {error}") from error
