"""JSON files of the pipeline, with a checksum, so that damage and edits by hand are noticed.

    {
      "charged": {"generate": 1.2e9, ...},
      "winnow-sha256": "9f86d081884c7d65..."
    }

The checksum is the last key of the object, so the file stays plain JSON. It is computed over the
values, in one order of keys and without white space: what is checked is exactly what is used, and
a file that was only formatted in another way is still whole. Equal values make equal files.

What has no checksum, and why: the metrics that DVC shows (`report/metrics`; the key would be one of
them, and no stage reads them), `report/leaderboard.json` (a list; its checksum stands in
`report/summary.json`), and the digests of the code (no stage reads them, and the stage `code`
writes them before every run)."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common.files import ArtifactError, write_text
from tasks.common.remedy import remedy
from tasks.common.seal import KEY, DamagedError

logger = logging.getLogger(__name__)


class Sealed(dict[str, Any]):
    """The values of a sealed file. ArtifactError names the file where one is missing, at any depth:
    it is another file then, or of an earlier version."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(
            {k: Sealed(path, v) if isinstance(v, dict) else v for k, v in values.items()}
        )
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise ArtifactError(
            f"{self.path} has no {key}: another file is in its place, or it is of an earlier "
            f"version. {remedy(self.path)}"
        )


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` and its checksum as indented JSON, whole or not at all."""
    text = encode(value)
    write_text(path, text)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote. Raises ArtifactError, which names the file and how to get it
    back, where it is missing, damaged or edited; and later, for a key that it does not have."""
    try:
        return Sealed(path, decode(path.read_bytes()))
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist: run the stage that makes it first") from error
    except DamagedError as error:
        raise DamagedError(f"{path} {error}. {remedy(path)}") from error


def read_note(path: Path) -> dict[str, Any]:
    """Read a sealed file that nothing depends on: empty where it is missing, and with a warning
    where it is damaged."""
    try:
        return Sealed(path, decode(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except DamagedError as error:
        logger.warning("%s %s: it is left out", path, error)
        return {}


def encode(value: Mapping[str, Any]) -> str:
    """The text of a sealed file."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    plain = json.loads(text)  # keys as they will be read: JSON has no numbers there
    return json.dumps({**plain, KEY: checksum(plain)}, indent=2, ensure_ascii=False) + "\n"


def decode(content: bytes) -> dict[str, Any]:
    """The values in a sealed file; DamagedError says what is wrong with it."""
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"is damaged: it is not JSON ({error})") from error
    if not isinstance(value, dict) or KEY not in value:
        raise DamagedError(f"is damaged, or of an earlier version: it has no {KEY}")
    if value.pop(KEY) != checksum(value):
        raise DamagedError(f"is damaged, or was edited: its values do not match the checksum {KEY}")
    return value


def checksum(value: Any) -> str:
    """The sha256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
