"""What is wrong with the parameters, as the stages themselves find it, all of it at once."""

import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.code.effective import complete
from tasks.common import registry
from tasks.common.params import Problems, as_list, gathered, section, unknown
from tasks.grading import verifiers
from tasks.grading.loading import load as load_verifier
from tasks.grading.settings import Verify
from tasks.ingest.reading import sources
from tasks.ingest.run import shares
from tasks.ingest.settings import Ingest
from tasks.ingest.splits import check as check_splits
from tasks.policy.examples import settings_of
from tasks.policy.settings import Policy
from tasks.train.environments.environment import load_environment

Values = Mapping[str, Any]
REGISTERED = re.compile(r'^(?:DATASET_NAME = |register_dataset\(\s*)"(\w+)"', re.MULTILINE)


def check(values: Values) -> tuple[list[str], dict[str, Any] | None]:
    """Return what is wrong, and the complete values; None where they cannot be read."""
    problems = Problems()
    whole: dict[str, Any] | None = problems.of(complete, values)
    for look in (check_sources, check_families, check_verifiers):
        problems.of(look, values)
    if whole is not None:
        problems.of(check_environments, whole)
        problems.messages += not_installed(whole)
    return list(dict.fromkeys(problems.messages)), whole


def check_sources(values: Values) -> None:
    """Check the entries of `ingest.sources` as `ingest` does before it reads a row."""
    settings = section(values, "ingest", Ingest)
    chosen = sources(settings.sources)
    check_splits(settings.splits, shares(chosen))
    with gathered() as problems:
        for number, source in enumerate(chosen):
            if source.preset == "reasoning_gym":
                where = f"ingest.sources[{number}].settings.tasks"
                problems.of(
                    check_generated, [task["name"] for task in source.settings["tasks"]], where
                )


def check_generated(names: list[str], where: str) -> None:
    """Raise ParamsError for tasks that the library reasoning_gym does not have. It is imported,
    which takes seconds, only where its files do not show one."""
    if {*names} <= reasoning_gym_tasks():
        return
    known = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    with gathered() as problems:
        for number, name in enumerate(names):
            if name not in known:
                problems.add(
                    unknown(f"{where}[{number}].name is {name!r}; reasoning_gym has", name, known)
                )


def reasoning_gym_tasks() -> set[str]:
    """Return the library's tasks, as its files register them."""
    spec = importlib.util.find_spec("reasoning_gym")
    files = Path(str(spec.origin)).parent.glob("**/*.py") if spec else ()
    return {name for path in files for name in REGISTERED.findall(path.read_text())}


def check_families(values: Values) -> None:
    """Check the skills of the policy that is made here."""
    settings = section(values, "policy", Policy)
    if settings.source == "tiny":
        settings_of(settings.tiny.families)


def check_environments(whole: Values) -> None:
    """Load what the conversations of the experiment's recipes are held with."""
    with gathered() as problems:
        for recipe in whole["recipes"].values():
            generate = recipe["train"].get("generate", whole["train"]["generate"])
            if "environment" in generate:
                problems.of(load_environment, generate["environment"])


def check_verifiers(values: Values) -> None:
    """Load every verifier that is configured, and look for those that a source names."""
    configured = section(values, "verify", Verify).verifiers
    problems = Problems()
    for name in configured:
        problems.of(load_verifier, name, configured)
    known = [*configured, *registry.names(verifiers)]
    ingest = values.get("ingest")
    entries = as_list(ingest.get("sources") if isinstance(ingest, dict) else None)
    for number, entry in enumerate(entries):
        for where, name in under_verifier(entry, f"ingest.sources[{number}]"):
            if name not in known:
                problems.add(unknown(f"{where} is {name!r}; there is", name, known))
    problems.report()


def under_verifier(value: Any, where: str) -> list[tuple[str, str]]:
    """Every text under a key `verifier`, however deep, and where it stands."""
    if isinstance(value, list):
        parts = [(f"{where}[{number}]", inner) for number, inner in enumerate(value)]
        return [pair for place, inner in parts for pair in under_verifier(inner, place)]
    found = []
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "verifier" and isinstance(inner, str):
            found.append((f"{where}.verifier", inner))
        else:
            found += under_verifier(inner, f"{where}.{key}")
    return found


def not_installed(whole: Values) -> list[str]:
    """Packages that the parameters ask for and this environment lacks."""
    found = [
        f"tracking.also names {name}, which is not installed: python -m pip install --constraint "
        f'requirements.txt --editable ".[{name}]", or take it out'
        for name in whole["tracking"]["also"]
        if not is_installed(name)
    ]
    if whole["engine"]["name"] == "vllm" and not is_installed("vllm"):
        found.append("engine.name is vllm, which is not installed: make env VLLM=gpu, or set auto")
    if whole["engine"]["cluster"] != "local" and not is_installed("ray"):
        found.append(
            "engine.cluster names a Ray cluster, and ray is not installed: install the extra `ray`"
        )
    return found


def is_installed(package: str) -> bool:
    """Whether a package is there; a folder of its name, as a tracker leaves, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
