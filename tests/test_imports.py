"""Who may import whom, and whether dvc.yaml names every file that can change a stage's values.

The rules are read from the syntax trees, nothing is imported: an import inside a function counts as
well."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("ingest", "policy", "profile", "baseline", "allocate", "train", "evaluate", "report")

# Of tasks/common, what cannot change a value: it may change without any stage running again.
NO_VALUES = {
    *(
        "changes",
        "journal",
        "locations",
        "params",
        "pipelines",
        "process",
        "progress",
        "registry",
        "stage",
        "tracking",
    )
}

# Its digest of what it would make decides, not the code it shares: a change elsewhere must not make
# the policy again.
STANDS_ALONE = {"policy"}

# Only these files may import these libraries.
ONE_FILE = {"vllm": "tasks/engines/vllm.py", "mlflow": "tasks/common/tracking.py"}
NOT_IN_A_CORE = {"prefect", "dvc", "mlflow", "yaml", "argparse"}


def imports(path: Path, root: Path) -> set[str]:
    """The modules that the file imports, with what is imported from a package as its possible
    submodule."""
    package = path.relative_to(root).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


# Each floor and those that it stands on; stages stand on all of them.
FLOORS = {
    "common": {"common"},
    "models": {"models", "common"},
    "engines": {"engines", "models", "common"},
    "store": {"store", "engines", "models", "common"},
    "grading": {"grading", "common"},
}
NO_STORE = {"train"}  # it samples from the engine directly


def allowed(relative: Path) -> set[str]:
    """The packages of this repository that a file may import."""
    if relative.parts[0] == "flows":
        return {"flows", "tasks.common"}
    part = relative.parts[1] if len(relative.parts) > 2 else ""
    rooms = FLOORS.get(part, {part, *FLOORS} - ({"store"} if part in NO_STORE else set()))
    return {f"tasks.{room}" for room in rooms} if part else set()


def breaches(root: Path) -> Iterator[str]:
    """One line for every import that the rules forbid."""
    for path in sorted([*root.glob("flows/**/*.py"), *root.glob("tasks/**/*.py")]):
        relative = path.relative_to(root)
        modules = imports(path, root)
        for module in sorted(modules):
            own = within(module, {"tasks", "flows", "tests"}) and module != "tasks"
            if own and not within(module, allowed(relative)):
                yield f"{relative} imports {module}"
        yield from (f"{relative} imports {name}" for name in sorted(foreign(relative, modules)))


def foreign(relative: Path, modules: set[str]) -> set[str]:
    """The libraries that this file imports and may not."""
    tops = {module.partition(".")[0] for module in modules}
    found = {
        name for name, only in ONE_FILE.items() if name in tops and relative.as_posix() != only
    }
    if relative.parts[0] == "flows":
        return found | {
            name
            for name in tops - {"flows", "tasks", "prefect"}
            if name not in sys.stdlib_module_names
        }
    if relative.parts[1] != "common" and relative.name != "__main__.py":
        found |= tops & NOT_IN_A_CORE
    return found


def module_file(module: str, root: Path) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next(
        (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None
    )


def reachable(stage: str, root: Path) -> set[Path]:
    """The files under tasks/ that a stage's folder holds or imports, directly or through others."""
    found: set[Path] = set()
    pending = list((root / "tasks" / stage).glob("**/*.py"))
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        if path.parent.name == "common" and path.stem in NO_VALUES:
            continue
        files = (
            module_file(module, root) for module in imports(path, root) if within(module, {"tasks"})
        )
        pending += [file for file in files if file]
    return found


def unnamed(stage: str, root: Path) -> list[str]:
    """The files that can change the stage's values and that none of its deps in dvc.yaml covers."""
    deps = [
        root / dep
        for dep in yaml.safe_load((root / "dvc.yaml").read_text())["stages"][stage]["deps"]
    ]
    return sorted(
        path.relative_to(root).as_posix()
        for path in reachable(stage, root)
        if not any(path == dep or dep in path.parents for dep in deps)
        and not (path.parent.name == "common" and path.stem in NO_VALUES)
        and path.read_text().strip()
    )


def test_imports_keep_to_the_rules() -> None:
    assert list(breaches(ROOT)) == []


@pytest.mark.parametrize("stage", sorted(set(STAGES) - STANDS_ALONE - {"baseline"}))
def test_deps_name_every_file_that_can_change_values(stage: str) -> None:
    assert unnamed(stage, ROOT) == []


def test_every_stage_folder_is_a_stage_of_the_pipeline() -> None:
    folders = {path.parent.name for path in ROOT.glob("tasks/*/__main__.py")}
    stages = set(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
    assert stages == set(STAGES)
    assert folders == stages - {"baseline"}  # `evaluate` without a recipe


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_checker_finds_breaches(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        {
            "flows/pipeline.py": "import prefect\nimport dvc\nfrom tasks.train import settings\n",
            "tasks/common/artifacts.py": "import polars\nfrom tasks.store import folder\n",
            "tasks/common/tracking.py": "import mlflow\n",
            "tasks/engines/server.py": "def f():\n    import vllm\n",
            "tasks/models/policy.py": "from tasks.engines import engine\n",
            "tasks/grading/grader.py": "from tasks.models import policy\n",
            "tasks/train/loop.py": "from tasks.allocate import plan\nimport yaml\n",
            "tasks/train/settings.py": "from tasks.store import folder\n",
            "tasks/train/__main__.py": "import argparse\nfrom . import loop\n",
        },
    )
    assert sorted(breaches(root)) == [
        "flows/pipeline.py imports dvc",
        "flows/pipeline.py imports tasks.train",
        "flows/pipeline.py imports tasks.train.settings",
        "tasks/common/artifacts.py imports tasks.store",
        "tasks/common/artifacts.py imports tasks.store.folder",
        "tasks/engines/server.py imports vllm",
        "tasks/grading/grader.py imports tasks.models",
        "tasks/grading/grader.py imports tasks.models.policy",
        "tasks/models/policy.py imports tasks.engines",
        "tasks/models/policy.py imports tasks.engines.engine",
        "tasks/train/loop.py imports tasks.allocate",
        "tasks/train/loop.py imports tasks.allocate.plan",
        "tasks/train/loop.py imports yaml",
        "tasks/train/settings.py imports tasks.store",
        "tasks/train/settings.py imports tasks.store.folder",
    ]


def test_the_checker_finds_missing_deps(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        {
            "dvc.yaml": "stages: {profile: {cmd: x, deps: [tasks/profile, tasks/store]}}",
            "tasks/profile/__main__.py": "from tasks.common import stage\nimport tasks.store\n",
            "tasks/store/rollouts.py": "from tasks.common.ledger import Ledger\n",
            "tasks/common/stage.py": "from tasks.common import process\n",
            "tasks/common/ledger.py": "from tasks.common import artifacts\n",
            "tasks/common/artifacts.py": "OUTCOMES = ()\n",
            "tasks/common/process.py": "pass\n",
        },
    )
    assert unnamed("profile", root) == ["tasks/common/artifacts.py", "tasks/common/ledger.py"]
