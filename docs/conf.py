"""Sphinx: `make docs`."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "extensions"))

project = "Winnow"
version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
release = version
extensions = ["myst_parser", "reference"]
exclude_patterns = ["_build", "extensions"]
myst_heading_anchors = 3
suppress_warnings = ["ref.python"]  # two classes with one name: the reference links to neither
toc_object_entries = False  # thousands of names in the navigation of every page
html_theme = "furo"
html_title = f"Winnow {version}"
html_copy_source = False
