"""The versions of the libraries that change values.

A different version of a library in PACKAGES makes every cell that can import the library stale.
Only the policy is not rebuilt, because its weights are in git and everything depends on them.

The version is that of the installed package, without a local suffix: 2.13.0+cpu and 2.13.0+cu130
count as one version, so that different machines can share results. If a package is not installed,
such as vLLM on a machine without a GPU, the pinned version counts, for the same reason."""

import json
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tasks.common.code import ALIASES, installed_version
from tasks.common.params import ParamsError

OF_EXTRAS = ("requirements/torchao.txt", "requirements/trl.txt")
PINS = ("requirements.txt", "requirements/cpu.txt", *OF_EXTRAS)
PACKAGES_OF = """
import importlib.metadata, json
print(json.dumps(sorted((one.name, one.version) for one in importlib.metadata.distributions())))
"""
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
    "trl": ("trl", "accelerate", "transformers"),
    "vllm": ("vllm",),
}
"""The packages behind each imported module whose version changes values."""


def versions(modules: Iterable[str], root: Path) -> dict[str, str | None]:
    """Return the installed or pinned version of each package of `modules`, None if unknown."""
    names = {name for module in modules for name in PACKAGES.get(module, ())}
    return {name: installed_version(name) or pinned(name, root) for name in sorted(names)}


@cache
def packages_of(interpreter: str) -> dict[str, str]:
    """Return the packages of another interpreter with their versions. Raise ParamsError if it does
    not run."""
    command = [interpreter, "-I", "-c", PACKAGES_OF]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return {f"{interpreter}: {name}": version for name, version in json.loads(found.stdout)}
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ParamsError(
            f"train.external.python: {interpreter} does not run ({error}): name the interpreter of "
            "an environment that has TRL"
        ) from error


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
