"""The pins are complete, and satisfy pyproject.toml, which excludes versions that break others."""

import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "requirements.txt",
    "requirements/cpu.txt",
    "requirements/docs.txt",
    "requirements/ray.txt",
    "requirements/security.txt",
    "requirements/torchao.txt",
    "requirements/trl.txt",
)

# torchvision breaks transformers with the CPU build of torch. The others are its unused
# dependencies.
UNWANTED = {"torchvision", "torchaudio", "torchcodec", "triton"}


def read(name: str) -> dict[str, str]:
    """Return the version of each package. A line that is not an exact pin fails."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    assert [pair for pair in pairs if len(pair) != 2] == []
    return {canonicalize_name(package): version for package, version in pairs}


def names_of(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


PINS = {name: read(name) for name in FILES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


PINNED = {
    "requirements.txt": PROJECT["dependencies"] + EXTRAS["test"],
    **{f"requirements/{extra}.txt": EXTRAS[extra] for extra in EXTRAS},
}


@pytest.mark.parametrize("name", FILES)
def test_pins_satisfy_the_project(name: str) -> None:
    for requirement in map(Requirement, PINNED[name]):
        pinned = PINS[name][canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), requirement


def test_docs_and_base_pin_the_same_versions() -> None:
    docs, base = PINS["requirements/docs.txt"], PINS["requirements.txt"]
    assert [name for name in docs.keys() & base.keys() if docs[name] != base[name]] == []


@pytest.mark.parametrize("name", FILES)
def test_unwanted_packages_are_not_pinned(name: str) -> None:
    assert UNWANTED & set(PINS[name]) == set()


def test_no_package_is_pinned_twice() -> None:
    assert set(PINS["requirements.txt"]) & set(PINS["requirements/cpu.txt"]) == set()


def test_supported_python_versions_agree() -> None:
    """Compare pyproject.toml's range and classifiers, the Makefile, and the GitHub matrix."""
    versions = ["3.11", "3.12", "3.13"]
    requires = Requirement(f"winnow{PROJECT['requires-python']}").specifier
    assert [v for v in ("3.10", *versions, "3.14") if requires.contains(v)] == versions
    assert [line.rpartition(" ")[2] for line in PROJECT["classifiers"]] == versions
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "Makefile").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["compat"]["strategy"]["matrix"]["python"] == versions


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_pins_are_complete_on_every_supported_python(version: str) -> None:
    """Pins are installed without dependencies, and some dependencies are for some Pythons only."""
    environment = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
    missing = set()
    for name in PINS["requirements.txt"]:
        if name == "torch":  # it is installed with its dependencies
            continue
        for line in metadata.requires(name) or []:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate(environment):
                missing.add(canonicalize_name(wanted.name))
    assert missing - set(PINS["requirements.txt"]) == set()
