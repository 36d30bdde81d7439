"""The allowed imports of each file.

The imports are read from the syntax trees, also those inside functions. `tests/code` tests which
files can change a stage's values."""

import ast
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import yaml
from packaging.utils import canonicalize_name

from tasks.common.code import imports
from tests.files import plant
from tests.test_pins import EXTRAS, PROJECT, names_of

ROOT = Path(__file__).resolve().parent.parent
STAGES = {"code", "ingest", "policy", "profile", "baseline", "allocate", "train", "evaluate"}
STAGES |= {"report"}

# Only these files, or folders, may import these libraries.
ONE_FILE = {
    "vllm": (
        "tasks/engines/vllm.py",
        "tasks/engines/options.py",
        "tasks/engines/weights/nccl.py",
        "tasks/engines/weights/extension.py",
    ),
    "torchao": ("tasks/train/learner/optimizer.py", "tasks/models/lora.py"),
    "ray": "tasks/engines/cluster/hosts.py",
    "mlflow": "tasks/common/tracking/",
    "starlette": (
        "flows/serve/app.py",
        "tasks/common/processes/own_pages.py",
        "tasks/train/external/service.py",
    ),
    "shtab": "flows/__main__.py",
}
OF_PREFECT = {"pydantic", "httpx", "starlette"}  # forms, errors of the client, the application
OF_DVC = {"shtab"}  # completion of the command line
IN_FLOWS = {"flows", "tasks", "prefect", "tabulate", *OF_PREFECT, *OF_DVC}
NOT_IN_A_CORE = {"prefect", "dvc", "mlflow", "yaml", "argparse"}


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


# The layers, and the layers that each may import. Stages may import all of them.
LAYERS = {
    "common": {"common"},
    "models": {"models", "common"},
    "engines": {"engines", "models", "common"},
    "store": {"store", "engines", "models", "common"},
    "grading": {"grading", "common"},
    # it runs first, without torch: it imports settings, and how the methods of a recipe get theirs
    "code": {
        *("code", "common", "train.loading", "train.external.trl_arguments"),
        "allocate.planning",
    },
}
ABOVE_STAGES = {"doctor", "benchmark", "reading", "publishing"}  # rooms of the flows
READS_SOURCES = {"policy"}  # of demonstrations
NO_STORE = {"train"}  # it samples from the engine directly


def allowed(relative: Path) -> set[str]:
    """Return the packages of this repository that a file may import."""
    part = relative.parts[1] if len(relative.parts) > 2 else ""
    if relative.parts[0] == "flows":
        of_cli = {"tasks.train.external"} if part == "cli" else set()
        return {"flows", "tasks"} if part in ABOVE_STAGES else {"flows", "tasks.common", *of_cli}
    rooms = LAYERS.get(
        part, {part, *LAYERS} - {"code"} - ({"store"} if part in NO_STORE else set())
    )
    rooms = rooms | ({"ingest"} if part in READS_SOURCES else set())
    return {f"tasks.{room}" for room in rooms} if part else set()


def is_settings(module: str, relative: Path) -> bool:
    """Return whether a stage, or a package above the stages, imports settings of a stage, or what
    follows from them (`needs`)."""
    package, _, name = module.removeprefix("tasks.").partition(".")
    is_above = relative.parts[0] == "tasks" and relative.parts[1] not in set(LAYERS) - {"code"}
    return is_above and package != "code" and name.split(".")[0] in ("settings", "needs")


def breaches(root: Path) -> Iterator[str]:
    """Yield a line for each forbidden import."""
    for path in sorted([*root.glob("flows/**/*.py"), *root.glob("tasks/**/*.py")]):
        relative = path.relative_to(root)
        modules = imports(path, root)
        for module in sorted(modules):
            own = within(module, {"tasks", "flows", "tests"}) and module != "tasks"
            if own and not within(module, allowed(relative)) and not is_settings(module, relative):
                yield f"{relative} imports {module}"
        yield from (f"{relative} imports {name}" for name in sorted(foreign(relative, modules)))


def foreign(relative: Path, modules: set[str]) -> set[str]:
    """Return the libraries that this file must not import, but does."""
    tops = {module.partition(".")[0] for module in modules}
    found = {
        name
        for name, only in ONE_FILE.items()
        if name in tops and not relative.as_posix().startswith(only)
    }
    if relative.parts[0] == "flows" and relative.parts[1] not in ABOVE_STAGES:
        return found | {name for name in tops - IN_FLOWS if name not in sys.stdlib_module_names}
    if relative.parts[1] != "common" and relative.name != "__main__.py":
        found |= tops & NOT_IN_A_CORE
    return found


def test_imports_follow_the_rules() -> None:
    assert list(breaches(ROOT)) == []


IN_LOOP = {("tasks.train.loop.trainer", "tasks.train.warm_start")}  # still to be resolved


def test_no_two_modules_import_each_other() -> None:
    """Imports only for types count, too."""
    paths = [*ROOT.glob("flows/**/*.py"), *ROOT.glob("tasks/**/*.py")]
    edges = {
        (".".join(path.relative_to(ROOT).with_suffix("").parts), f"{node.module}{name}")
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in ("", *(f".{alias.name}" for alias in node.names))
    }
    circles = {edge for edge in edges if edge[::-1] in edges and edge < edge[::-1]}
    assert circles <= IN_LOOP


def loaded_by_name(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each name that a file of the flows takes from a module which it
    loads by a string. Linters cannot check these."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        modules = {
            ast.unparse(node.targets[0]): ast.literal_eval(node.value.args[0])
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "importlib.import_module"
            and isinstance(node.value.args[0], ast.Constant)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (name := ast.unparse(node.value)) in modules:
                yield modules[name], node.attr


def test_names_that_the_flows_load_exist() -> None:
    found = {each for path in ROOT.glob("flows/**/*.py") for each in loaded_by_name(path)}
    assert ("tasks.code.effective", "complete") in found
    assert [(m, n) for m, n in found if not hasattr(importlib.import_module(m), n)] == []


def test_imported_packages_are_declared() -> None:
    paths = [*ROOT.glob("flows/**/*.py"), *ROOT.glob("tasks/**/*.py")]
    tops = {module.partition(".")[0] for path in paths for module in imports(path, ROOT)}
    tops -= {"flows", "tasks", *sys.stdlib_module_names}
    packages = packages_distributions()
    found = [{canonicalize_name(name) for name in packages.get(top, [top])} for top in tops]
    declared = names_of(chain(PROJECT["dependencies"], *EXTRAS.values()))
    assert [names for names in found if not names & declared] == []
    unused = names_of(PROJECT["dependencies"]) - set.union(*found)
    assert unused == {"boto3", "fastapi", "s3fs", "sqlalchemy"}  # for MLflow, Prefect and fsspec


def test_every_stage_folder_is_a_stage_of_the_pipeline() -> None:
    folders = {path.parent.name for path in ROOT.glob("tasks/*/__main__.py")}
    stages = set(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
    assert stages == STAGES
    assert folders == stages - {"baseline"}  # `evaluate` without a recipe


def test_checker_finds_breaches(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        {
            "flows/pipeline.py": "import prefect\nimport dvc\nfrom tasks.train import settings\n",
            "tasks/common/artifacts.py": "import polars\nfrom tasks.store import folder\n",
            "tasks/common/tracking/runs.py": "import mlflow\n",
            "tasks/engines/server.py": "def f():\n    import vllm\n",
            "tasks/train/loop.py": "from tasks.allocate import planning\nimport yaml\n",
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
        "tasks/train/loop.py imports tasks.allocate",
        "tasks/train/loop.py imports tasks.allocate.planning",
        "tasks/train/loop.py imports yaml",
        "tasks/train/settings.py imports tasks.store",
        "tasks/train/settings.py imports tasks.store.folder",
    ]
