"""Files for tests."""

from pathlib import Path


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write `files`, a text by path, under `root`; returns `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
