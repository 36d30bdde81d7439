"""All faults of the parameters at once, found by the checks of the stages themselves."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from tasks.code.effective import complete
from tasks.common import registry
from tasks.common.params import Problems, as_list, gathered, section, unknown
from tasks.grading import verifiers
from tasks.grading.loading import load as load_verifier
from tasks.grading.settings import Verify
from tasks.ingest.reading import sources
from tasks.ingest.settings import Ingest
from tasks.policy.examples import settings_of
from tasks.policy.settings import Policy
from tasks.train.environments.environment import load_environment

Values = Mapping[str, Any]


def check(values: Values) -> tuple[list[str], dict[str, Any] | None]:
    """Return the faults, and the complete values, or None if they cannot be read."""
    problems = Problems()
    whole: dict[str, Any] | None = problems.of(complete, values)
    for look in (check_sources, check_families, check_verifiers):
        problems.of(look, values)
    if whole is not None:
        problems.of(check_environments, whole)
        problems.messages += not_installed(whole)
    return list(dict.fromkeys(problems.messages)), whole


def check_sources(values: Values) -> None:
    """Check the entries of `ingest.sources` as `ingest` does before it reads a row, and those of
    `policy.supervised`."""
    sources(section(values, "ingest", Ingest).sources)
    supervised = section(values, "policy", Policy).supervised
    sources(supervised.sources if supervised else [])


def check_families(values: Values) -> None:
    """Check `policy.tiny.families`, if `policy.source` is `tiny`."""
    settings = section(values, "policy", Policy)
    if settings.source == "tiny":
        settings_of(settings.tiny.families)


def check_environments(whole: Values) -> None:
    """Check the environments that recipes of the experiment use."""
    with gathered() as problems:
        for recipe in whole["recipes"].values():
            generate = recipe["train"].get("generate", whole["train"]["generate"])
            if "environment" in generate:
                problems.of(load_environment, generate["environment"])


def check_verifiers(values: Values) -> None:
    """Load every configured verifier, and check that the verifiers named by sources exist."""
    configured = section(values, "verify", Verify).verifiers
    known = [*configured, *registry.names(verifiers)]
    ingest = values.get("ingest")
    entries = as_list(ingest.get("sources") if isinstance(ingest, dict) else None)
    with gathered() as problems:
        for name in configured:
            problems.of(load_verifier, name, configured)
        for where, name in under_verifier(entries, "ingest.sources"):
            if name not in known:
                problems.add(unknown(f"{where} is {name!r}; use", name, known))


def under_verifier(value: Any, where: str) -> list[tuple[str, str]]:
    """Return (place, text) for every text under a key `verifier`, at any depth."""
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
    """Return a fault for each package that the parameters require and this environment lacks."""
    found = [
        f"tracking.also names {name}, which is not installed: python -m pip install --constraint "
        f'requirements.txt --editable ".[{name}]", or remove it'
        for name in whole["tracking"]["also"]
        if not is_installed(name)
    ]
    if whole["engine"]["name"] == "vllm" and not is_installed("vllm"):
        found.append("engine.name is vllm, but it is not installed: make env VLLM=gpu, or set auto")
    if whole["engine"]["cluster"] != "local" and not is_installed("ray"):
        found.append(
            "engine.cluster names a Ray cluster, but ray is not installed: install the extra `ray`"
        )
    return found


def is_installed(package: str) -> bool:
    """Return whether a package is installed; a tracker's folder of that name does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
