"""The code that each cell of the pipeline can run. A cell is a stage, or a stage of one recipe.

A cell's files are the files that its `__main__` reaches by imports and by module names, and the
files that the registries load by the names in the cell's own parameters: the source, the strategy,
the methods in the slots, the engine, the verifiers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.code.left_out import is_left_out
from tasks.code.verifiers import verifiers_in_use
from tasks.code.versions import packages_of, versions
from tasks.common import recipes
from tasks.common.code import digest_of, libraries, module_file, reach
from tasks.common.registry import declared
from tasks.policy.settings import Policy

Params = Mapping[str, Any]

AUTO_ENGINES = ("hf", "vllm")
"""The engines of `engine.name: auto`. Both count on every machine: a digest must not depend on the
presence of a GPU."""

POLICY = "tasks/policy/"
EXTERNAL_MAKERS = ("tasks.policy.source", "tasks.policy.card")
CONVERTERS = ("tasks.policy.converted",)


@dataclass(frozen=True)
class Cell:
    """The modules from which a cell's code is reached. `within` restricts the files to folders;
    `versioned` states whether the versions of the cell's libraries count. `read` are modules whose
    files the cell reads but does not run."""

    modules: tuple[str, ...]
    read: tuple[str, ...] = ()
    within: tuple[str, ...] = ("",)
    versioned: bool = True
    interpreter: str | None = None  # of another trainer, whose packages count

    def digests(self, root: Path) -> dict[str, Any]:
        """Return the content of the cell's digest file: `files` and `versions`."""
        looked_into = {path for name in self.read if (path := module_file(name, root))}
        reached = {
            path.relative_to(root).as_posix(): path
            for path in reach(self.modules, root) | looked_into
        }
        files = {
            name: path
            for name, path in sorted(reached.items())
            if name.startswith(self.within) and not is_left_out(name)
        }
        run = [path for path in files.values() if path not in looked_into]
        imported = libraries(run, root) if self.versioned else ()
        own = versions(imported, root)
        if self.interpreter is not None:
            own |= packages_of(self.interpreter)
        return {"files": {name: digest_of(path) for name, path in files.items()}, "versions": own}


def cells(values: Params, root: Path) -> dict[str, Cell]:
    """Return every cell of the experiment, keyed by the name of its digest file without the suffix.
    `values` are complete (see `effective.py`)."""
    engines, verifiers = engine_modules(values, root), verifier_modules(values, root)
    supervised = values["policy"]["supervised"] or {"sources": []}
    entries = [*values["ingest"]["sources"], *supervised["sources"]]
    by_name = {
        "ingest": Cell(("tasks.ingest.__main__", *source_modules(entries, root), *verifiers)),
        "policy": policy_cell(values, root),
        "profile": Cell(("tasks.profile.__main__", *engines, *verifiers)),
        "baseline": Cell(("tasks.evaluate.__main__", *engines, *verifiers)),
        "report": Cell(("tasks.report.__main__",)),
    }
    for name in values["recipes"]:
        recipe = recipes.recipe(values, name)
        strategy = named("tasks.allocate.strategies", [recipe["allocate"]["strategy"]], root)
        slots = slot_modules(recipe["train"], root)
        trainer = named("tasks.train.trainers", [recipe["train"].get("trainer", "own")], root)
        readers = readers_of(slots, root)
        # the module that loads the profile's samples, if a slot or a warm start reads them
        is_warm = (recipe["train"].get("warm_start") or {}).get("data") == "profile"
        samples = ["tasks.allocate.samples"] * bool(readers or is_warm)
        by_name |= {
            f"{name}/allocate": Cell(
                ("tasks.allocate.__main__", *strategy, *samples), read=readers
            ),
            f"{name}/train": Cell(
                ("tasks.train.__main__", *trainer, *slots, *engines, *verifiers),
                interpreter=interpreter_of(recipe["train"].get("external") or {}),
            ),
            f"{name}/evaluate": by_name["baseline"],
        }
    return by_name


def interpreter_of(external: Params) -> str | None:
    """Return the Python of another trainer (`train.external`), whose packages count, or None."""
    program = (external.get("command") or [""])[0]
    is_python = Path(program).name.startswith("python")
    return external.get("python") or (program if is_python else None)


def policy_cell(values: Params, root: Path) -> Cell:
    """Return the cell of the code that makes the policy. It excludes code outside POLICY, the
    versions of libraries and, for `tiny`, the card's code: these must not cause a new policy."""
    policy, makers = values["policy"], tuple[str, ...]()
    if policy["source"] != "tiny":
        makers = CONVERTERS if Policy(policy["source"]).is_converted else EXTERNAL_MAKERS
    else:
        names = [family["name"] for family in policy["tiny"]["families"]]
        makers = ("tasks.policy.tiny", *named("tasks.policy.families", names, root))
    if policy["supervised"] is None:
        return Cell(makers, within=(POLICY,), versioned=False)
    read = source_modules(policy["supervised"]["sources"], root)
    makers = (*makers, "tasks.policy.supervised", *read)
    return Cell(makers, within=(POLICY, "tasks/ingest/"), versioned=False)


def engine_modules(values: Params, root: Path) -> list[str]:
    name = values["engine"]["name"]
    return named("tasks.engines", AUTO_ENGINES if name == "auto" else [name], root)


def source_modules(entries: Iterable[Params], root: Path) -> list[str]:
    names = [entry["preset"] for entry in entries]
    return named("tasks.ingest.sources", names, root)


def verifier_modules(values: Params, root: Path) -> list[str]:
    """Return the modules of the verifiers in use, and of the process that loads them."""
    files = verifiers_in_use(values, root)
    return ["tasks.grading.verifier_worker", *named("tasks.grading.verifiers", files, root)]


def slot_modules(train: Params, root: Path) -> list[str]:
    """Return the methods in the slots of a recipe, and the environments that they name; each folder
    of `methods` is a slot."""
    folders = sorted(path for path in (root / "tasks/train/methods").iterdir() if path.is_dir())
    found = []
    for folder in folders:
        specs = train.get(folder.name)
        for spec in specs if isinstance(specs, list) else [specs]:
            if not isinstance(spec, dict):
                continue
            found += named(f"tasks.train.methods.{folder.name}", [spec.get("method")], root)
            environment = spec.get("environment")
            if isinstance(environment, dict):
                found += named("tasks.train.environments", [environment.get("name")], root)
    return found


def readers_of(slots: Iterable[str], root: Path) -> tuple[str, ...]:
    """Return the methods whose file has a line `reads_profile = True`."""
    files = {module: module_file(module, root) for module in slots}
    return tuple(name for name, file in files.items() if file and declared(file, "reads_profile"))


def named(package: str, names: Iterable[Any], root: Path) -> list[str]:
    """Return the dotted names of the modules of `package` that `names` lists. Omit missing modules,
    and names that would lead out of the package's folder."""
    modules = [f"{package}.{name}" for name in names if str(name).isidentifier()]
    return [module for module in modules if module_file(module, root)]
