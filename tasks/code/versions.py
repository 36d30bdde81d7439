"""The versions of the libraries that change values.

A different version of a library in PACKAGES makes every cell that can import the library stale.
Only the policy is not rebuilt, because its weights are in git and everything depends on them.

The version is that of the installed package, without a local suffix: 2.13.0+cpu and 2.13.0+cu130
count as one version, so that different machines can share results. If a package is not installed,
such as vLLM on a machine without a GPU, the pinned version counts, for the same reason."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tasks.common.code import ALIASES, installed_version

PINS = ("requirements.txt", "requirements/cpu.txt", "requirements/torchao.txt")
PIN = re.compile(r"^([\w.-]+)==([^\s+;#]+)", re.MULTILINE)

PACKAGES = {
    "jinja2": ("jinja2",),
    "latex2sympy2_extended": ("latex2sympy2-extended", "sympy"),
    "math_verify": ("math-verify", "latex2sympy2-extended", "sympy"),
    "numpy": ("numpy",),
    "peft": ("peft",),
    "polars": ("polars",),
    "reasoning_gym": ("reasoning-gym",),
    "scipy": ("scipy",),
    "tokenizers": ("tokenizers",),
    "torch": ("torch",),
    "torchao": ("torchao",),
    "transformers": ("transformers", "tokenizers", "jinja2"),
    "vllm": ("vllm",),
}
"""The packages behind each imported module whose version changes values."""


def versions(modules: Iterable[str], root: Path) -> dict[str, str | None]:
    """Return the installed or pinned version of each package of `modules`, None if unknown."""
    names = {name for module in modules for name in PACKAGES.get(module, ())}
    return {name: installed_version(name) or pinned(name, root) for name in sorted(names)}


def pinned(name: str, root: Path) -> str | None:
    """Return the version of a package in the project's requirements, or None."""
    found = (pins(root).get(alias) for alias in ALIASES.get(name, (name,)))
    return next((version for version in found if version), None)


@cache
def pins(root: Path) -> dict[str, str]:
    files = [root / name for name in PINS]
    return dict(
        pin for path in files if path.is_file() for pin in PIN.findall(path.read_text().lower())
    )
