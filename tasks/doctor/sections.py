"""The sections of params.yaml, each as the stage that reads it would read it."""

import importlib
import importlib.util
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tasks.common import params, registry
from tasks.common.spelling import meant
from tasks.doctor.declared import declared, of
from tasks.doctor.problems import problems, raised

Values = Mapping[str, Any]

SECTIONS = {
    "experiment": ("tasks.common.params", "Experiment"),
    "ingest": ("tasks.ingest.run", "Ingest"),
    "policy": ("tasks.policy.making", "Policy"),
    "sampling": ("tasks.engines.engine", "Sampling"),
    "engine": ("tasks.engines.engine", "EngineSettings"),
    "store": ("tasks.store.folder", "StoreSettings"),
    "verify": ("tasks.grading.grader", "Verify"),
    "profile": ("tasks.profile.profile", "ProfileSettings"),
    "gates": ("tasks.allocate.gates", "Gates"),
    "allocate": ("tasks.allocate.plan", "AllocateSettings"),
    "train": ("tasks.train.settings", "TrainSettings"),
    "learner": ("tasks.train.settings", "LearnerSettings"),
    "guards": ("tasks.train.settings", "Guards"),
    "checkpoint": ("tasks.train.settings", "CheckpointSettings"),
    "evaluate": ("tasks.evaluate.evaluation", "Evaluate"),
    "report": ("tasks.report.settings", "ReportSettings"),
    "tracking": ("tasks.common.tracking", "Tracking"),
}
"""Each section with the dataclass that its stage reads it into."""

REGISTERED = re.compile(r'^(?:DATASET_NAME = |register_dataset\(\s*)"(\w+)"', re.MULTILINE)
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


def check(values: Values) -> list[str]:
    """What is wrong with the sections, but for the recipes."""
    found = []
    for name in values:
        if name not in SECTIONS and name != "recipes":
            guess = meant(name, SECTIONS)
            said = f"; did you mean {guess}?" if guess else ""
            found.append(
                f"section '{name}' is unknown; sections: {', '.join(SECTIONS)}, recipes{said}"
            )
    for name, (module, cls) in SECTIONS.items():
        if name in values:
            found += problems(values[name], declared(module, cls), name)
        else:
            found.append(f"section '{name}' is missing from params.yaml")
    if found:
        return [*found, *sources(values), *families(values), *verifiers(values)]
    return [
        *numbers(values),
        *engine(values["engine"]),
        *one_of(
            "policy.tiny.training.device", values["policy"]["tiny"]["training"]["device"], DEVICES
        ),
        *trackers(values["tracking"]),
        *sources(values),
        *families(values),
        *verifiers(values),
    ]


def numbers(values: Values) -> list[str]:
    """Numbers out of range, as the stages find them when they start."""
    experiment, sampling = values["experiment"], values["sampling"]
    least = {
        "profile.num_samples": values["profile"]["num_samples"],
        "evaluate.num_samples": values["evaluate"]["num_samples"],
        "verify.processes": values["verify"]["processes"],
        "allocate.passes": values["allocate"]["passes"],
        "sampling.max_tokens": sampling["max_tokens"],
        "engine.threads": values["engine"]["threads"],
        "engine.num_processes": values["engine"]["num_processes"],
        "checkpoint.keep": values["checkpoint"]["keep"],
    }
    found = [
        message
        for name, number in least.items()
        for message in raised(params.at_least, 1, **{name.replace(".", "__"): number})
    ]
    for name in ("recipes", "seeds"):
        if not experiment[name]:
            found.append(f"experiment.{name} is empty: name at least one")
        if len(set(experiment[name])) < len(experiment[name]):
            found.append(f"experiment.{name} has one of them twice: {experiment[name]}")
    if too_many := [k for k in values["evaluate"]["pass_at"] if k > least["evaluate.num_samples"]]:
        found.append(
            f"evaluate.pass_at has {too_many[0]}, and evaluate.num_samples is "
            f"{least['evaluate.num_samples']}: pass@k needs at least k samples"
        )
    return found


def engine(settings: Values) -> list[str]:
    """What the engine's own module would refuse."""
    engines = registry.names(importlib.import_module("tasks.engines"))
    found = [
        *one_of("engine.name", settings["name"], ["auto", *engines]),
        *one_of("engine.device", settings["device"], DEVICES),
        *one_of("engine.dtype", settings["dtype"], DTYPES),
        *raised(params.share, engine__memory_fraction=settings["memory_fraction"]),
    ]
    is_server = settings["name"] in ("server", "auto")
    if not is_server and (settings["urls"] or settings["num_replicas"] != 1):
        found.append(
            "engine.urls and engine.num_replicas apply to the engine server, and engine.name is "
            f"{settings['name']}: set it to server, or leave urls empty and num_replicas at 1"
        )
    if settings["cluster"] != "local":
        found += cluster(settings)
    if settings["name"] == "vllm" and importlib.util.find_spec("vllm") is None:
        found.append("engine.name is vllm, which is not installed: make env VLLM=gpu, or set auto")
    return found


def cluster(settings: Values) -> list[str]:
    """What the trainer would refuse of a cluster. Whether it is there, only a run finds out."""
    from tasks.engines.engine import EngineSettings, check_cluster

    found = raised(check_cluster, params.parse(settings, EngineSettings, "engine"))
    if importlib.util.find_spec("ray") is None:
        found.append(
            "engine.cluster names a Ray cluster, and ray is not installed: install the extra `ray`"
        )
    return found


def trackers(settings: Values) -> list[str]:
    """Trackers whose packages are not installed."""
    return [
        f"tracking.also names {name}, which is not installed: python -m pip install --constraint "
        f'requirements.txt --editable ".[{name}]", or take it out'
        for name in settings["also"]
        if not is_installed(name)
    ]


def is_installed(package: str) -> bool:
    """Whether a package is there; a folder of its name, as a tracker leaves, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def one_of(where: str, value: object, known: Collection[str]) -> list[str]:
    """A value that is none of those known, with the one that was probably meant."""
    if value in known:
        return []
    guess = meant(value, known)
    said = f"; did you mean {guess}?" if guess else ""
    return [f"{where} is {value!r}; there is: {', '.join(known)}{said}"]


def package(name: str) -> ModuleType:
    return importlib.import_module(name)


def sources(values: Values) -> list[str]:
    """The entries of `ingest.sources`, each with the settings of its preset, and the splits."""
    section = values.get("ingest")
    if not isinstance(section, dict) or not isinstance(section.get("sources"), list):
        return []
    entries = section["sources"]
    found = [] if entries else ["ingest.sources is empty: name at least one source"]
    for number, entry in enumerate(entries):
        if isinstance(entry, dict):
            found += source(entry, f"ingest.sources[{number}]")
    return found or whole_ingest(section)


def source(entry: dict[str, Any], where: str) -> list[str]:
    """One entry, its preset, and the preset's settings."""
    optional = declared("tasks.ingest.reading", "OPTIONAL")
    filled = {**dict.fromkeys(optional), **entry}
    found = problems(filled, declared("tasks.ingest.reading", "Source"), where)
    presets = registry.names(package("tasks.ingest.sources"))
    unknown = one_of(f"{where}.preset", entry.get("preset"), presets) if "preset" in entry else []
    if unknown or not isinstance(entry.get("settings"), dict) or "preset" not in entry:
        return found + unknown
    preset = of(f"tasks.ingest.sources.{entry['preset']}")
    left_out = preset.get("OPTIONAL") if preset.has("OPTIONAL") else ()
    settings = {**dict.fromkeys(left_out), **entry["settings"]}
    found += problems(settings, preset.get("Settings"), f"{where}.settings")
    if entry["preset"] == "reasoning_gym" and not found:
        found += generated(settings["tasks"], f"{where}.settings.tasks")
    return found


def generated(tasks: list[dict[str, Any]], where: str) -> list[str]:
    """Tasks that the library reasoning_gym does not have. It is imported, which takes seconds, only
    where its files do not show one."""
    known = reasoning_gym_tasks()
    if {task["name"] for task in tasks} <= set(known):
        return []
    known = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    return [
        message
        for number, task in enumerate(tasks)
        for message in suggestion(f"{where}[{number}].name", task["name"], known)
    ]


def suggestion(where: str, name: str, known: Collection[str]) -> list[str]:
    """As `one_of`, for names that are too many to list where one is near."""
    guess = meant(name, known)
    if name in known or guess is None:
        return one_of(where, name, known)
    return [f"{where} is {name!r}, which reasoning_gym does not have; did you mean {guess}?"]


def reasoning_gym_tasks() -> list[str]:
    """The library's tasks, as its files register them."""
    spec = importlib.util.find_spec("reasoning_gym")
    files = Path(str(spec.origin)).parent.glob("**/*.py") if spec else ()
    return sorted(name for path in files for name in REGISTERED.findall(path.read_text()))


def whole_ingest(section: dict[str, Any]) -> list[str]:
    """What `ingest` checks of its entries and of the splits before it reads a row. A preset that
    generates is left out: its library takes seconds to import."""
    optional = dict.fromkeys(declared("tasks.ingest.reading", "OPTIONAL"))
    entries = [{**optional, **entry} for entry in section["sources"]]

    def all_of_it() -> None:
        settings = params.parse(section, declared("tasks.ingest.run", "Ingest"), "ingest")
        declared("tasks.ingest.contamination", "check")(settings.contamination)
        share = declared("tasks.ingest.splits", "Share")
        shares = [
            share(e["split"], e["weight"], e["max_rows"], e["settings"].get("num_prompts"))
            for e in entries
        ]
        declared("tasks.ingest.splits", "check")(settings.splits, shares)

    found = raised(all_of_it) if isinstance(section.get("splits"), dict) else []
    for number, entry in enumerate(entries):
        where = f"ingest.sources[{number}]"
        if not of(f"tasks.ingest.sources.{entry['preset']}").has("read"):
            parsed = params.parse(entry, declared("tasks.ingest.reading", "Source"), where)
            found += raised(declared("tasks.ingest.reading", "check"), parsed, where)
    return found


def families(values: Values) -> list[str]:
    """The skills that the policy made here learns."""
    policy = values.get("policy")
    if not isinstance(policy, dict) or policy.get("source") != "tiny":
        return []
    tiny = policy.get("tiny")
    if not isinstance(tiny, dict):
        return []
    entries, found = tiny.get("families"), list[str]()
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        where = f"policy.tiny.families[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("settings"), dict):
            continue
        known = registry.names(package("tasks.policy.families"))
        unknown = one_of(f"{where}.name", entry.get("name"), known)
        found += unknown
        if not unknown:
            cls = declared(f"tasks.policy.families.{entry['name']}", "Settings")
            found += problems(entry["settings"], cls, f"{where}.settings")
    return found


def verifiers(values: Values) -> list[str]:
    """Every verifier that is configured, or that a source names."""
    section = values.get("verify")
    configured = section.get("verifiers") if isinstance(section, dict) else None
    if not isinstance(configured, dict):
        return []
    if not all(isinstance(settings, dict) for settings in configured.values()):
        return []
    known = [*configured, *registry.names(package("tasks.grading.verifiers"))]
    load: Callable[..., object] = package("tasks.grading.loading").load
    found = [message for name in configured for message in raised(load, name, configured)]
    for where, name in named_verifiers(values.get("ingest")):
        found += one_of(where, name, known)
    return found


def named_verifiers(section: Any) -> list[tuple[str, str]]:
    """Where a source names a verifier, and which."""
    entries = section.get("sources") if isinstance(section, dict) else None
    found = []
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        found += under_verifier(entry, f"ingest.sources[{number}]")
    return found


def under_verifier(value: Any, where: str) -> list[tuple[str, str]]:
    """Every text under a key `verifier`, however deep."""
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
