"""The effective settings: the defaults, params.yaml and the recipe, merged.

For every cell the stage `code` writes the values that can change its results, and the cell depends
on that file. So a changed value or default makes exactly those cells stale whose results it can
change. Values that cannot change a result are excluded: tracking, guards, locations and speed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tasks.allocate.planning import load_strategy
from tasks.allocate.settings import AllocateSettings, Gates
from tasks.common import recipes
from tasks.common.params import (
    Experiment,
    ParamsError,
    Problems,
    gathered,
    listed,
    section,
    sections,
    unknown,
)
from tasks.common.tracking.settings import Tracking
from tasks.engines.settings import EngineSettings, Sampling
from tasks.evaluate.settings import Evaluate
from tasks.grading.settings import Verify
from tasks.ingest.settings import Ingest
from tasks.policy.settings import Policy
from tasks.profile.settings import ProfileSettings
from tasks.report.settings import ReportSettings
from tasks.store.settings import StoreSettings
from tasks.train.external.trl_arguments import arguments_of
from tasks.train.loading import settings_of
from tasks.train.needs import declared
from tasks.train.settings import (
    SLOTS,
    CheckpointSettings,
    Guards,
    LearnerSettings,
    Sections,
    TrainSettings,
)

Values = Mapping[str, Any]

SECTIONS: dict[str, type] = {
    "experiment": Experiment,
    "ingest": Ingest,
    "policy": Policy,
    "sampling": Sampling,
    "engine": EngineSettings,
    "store": StoreSettings,
    "verify": Verify,
    "profile": ProfileSettings,
    "gates": Gates,
    "allocate": AllocateSettings,
    "train": TrainSettings,
    "learner": LearnerSettings,
    "guards": Guards,
    "checkpoint": CheckpointSettings,
    "evaluate": Evaluate,
    "report": ReportSettings,
    "tracking": Tracking,
}
"""The dataclass of each section."""

GRADING = ("seconds", "memory_gb", "verifiers")  # keys of `verify` that can change a verdict
SAMPLER = ("name", "dtype")  # keys of `engine` that can change a rollout of training
FORECAST = (
    "updates",
    "correction",
    "prompt_gradient",
    "select",
    "replay",
    "warm_start",
    "kl_coefficient",
    "reference",
)  # keys of `train` for a forecast


def complete(values: Values) -> dict[str, Any]:
    """Return all values: every section with its defaults, and the recipes of the experiment with
    their differences from the section `train`. Raise ParamsError with all problems."""
    with gathered() as problems:
        for name in values:
            if name not in (*SECTIONS, "recipes"):
                problems.add(unknown(f"section '{name}' is unknown; sections", name, SECTIONS))
        found = {name: problems.of(as_dict, values, name) for name in SECTIONS}
        found["train"] = problems.of(train_of, values)
        named = (found["experiment"] or {}).get("recipes", ())
        found["recipes"] = recipes_of(problems, values, named)
    return found


def as_dict(values: Values, name: str) -> dict[str, Any]:
    return asdict(section(values, name, SECTIONS[name]))


def train_of(values: Values) -> dict[str, Any]:
    """Return the section `train`, including the defaults of its methods."""
    return asdict(settings_of(recipes.base_train(values)))


def recipes_of(problems: Problems, values: Values, names: Iterable[str]) -> dict[str, Any]:
    """Return the recipes with all settings of their methods, after checking them. A mistake that
    several recipes share is reported once."""
    found, wrong = {}, defaultdict[str, list[str]](list)
    for name in names:
        try:
            found[name] = complete_recipe(values, name)
        except ParamsError as error:
            for message in error.problems:
                wrong[message].append(name)
    for message, by in wrong.items():
        is_named = f"'{by[0]}'" in message
        if message not in problems.messages:
            problems.add(message if is_named else f"recipe {listed(by)}: {message}")
    return found


def complete_recipe(values: Values, name: str) -> recipes.Recipe:
    """Return a recipe's `allocate` and its differences from `train`, with complete slots."""
    train, own = cell_of(values, name)["train"], recipes.resolved(values, name)
    more = ("shape", "warm_start")
    whole = {key: train[key] for key in (*SLOTS, *more) if key in own["train"]}
    return {**own, "train": {**own["train"], **whole}}


def check_plan(train: TrainSettings) -> None:
    """Raise ParamsError for a command whose prompts are not those of a plan."""
    if train.trainer == "command" and train.control["method"] != "plan":
        raise ParamsError(
            f"train.trainer is command, which trains on a plan, but train.control "
            f"{train.control['method']} chooses prompts while it trains: set it to plan"
        )


def check_trainer(train: TrainSettings, values: Values) -> None:
    """Raise ParamsError for settings that another trainer cannot follow, and if its cost is unknown
    in the account of the budget."""
    if train.trainer == "trl":
        arguments_of(train, section(values, "sampling", Sampling))
    budget = section(values, "experiment", Experiment).budget
    known = ("rollouts",) if train.trainer == "command" else ("charged", "rollouts", "tokens")
    if train.trainer != "own" and budget is not None and budget.account not in known:
        raise ParamsError(
            f"train.trainer is {train.trainer}, which cannot follow a budget in "
            f"{budget.account}: set experiment.budget.account to {listed(known)}"
        )


def check_profile(train: TrainSettings, values: Values) -> None:
    """Raise ParamsError for a slot that reads whole groups of the profile's samples, if their size
    depends on their outcomes."""
    chosen = {name: getattr(train, name) for name in SLOTS}
    readers = [
        f"train.{name} {spec['method']}"
        for name, spec in chosen.items()
        if declared(name, spec, "reads_groups")
    ]
    if readers and section(values, "profile", ProfileSettings).stop is not None:
        raise ParamsError(
            f"profile.stop is set, but {listed(readers)} needs the same number of samples of every "
            "prompt: set profile.stop to null, which samples only what is missing"
        )


def cell_of(values: Values, name: str) -> dict[str, Any]:
    """Return the values with which the recipe `name` is allocated and trained: `allocate`, and
    `train` with all settings of its methods. Raise ParamsError if they, or the other sections that
    training reads, are invalid."""
    recipe = recipes.recipe(values, name)
    with gathered() as problems:
        problems.of(load_strategy, recipe["allocate"])
        train = problems.of(settings_of, recipe["train"])
    check_plan(train)
    check_trainer(train, values)
    check_profile(train, values)
    sections(values, Sections).check(train)
    return {"allocate": recipe["allocate"], "train": asdict(train)}


def of_cells(whole: Values) -> dict[str, Values]:
    """Return, for every cell, the values that can change its results, keyed by the name of its file
    without the suffix. `whole` is the result of `complete`."""
    grading = {"verify": {key: whole["verify"][key] for key in GRADING}}
    altering = section(whole, "engine", EngineSettings).altering
    of_engine = {"engine": altering} if altering else {}
    sampled = {"sampling": whole["sampling"], **grading}
    stored = {**sampled, **of_engine}
    measured = {"evaluate": whole["evaluate"], **stored}
    policy = dict(whole["policy"])
    del policy["trust_remote_code" if policy["source"] == "tiny" else "tiny"]
    supervised = policy["supervised"]
    if supervised is None:
        del policy["supervised"]
    taught = {key: value for key, value in (supervised or {}).items() if key != "training"}
    by_name: dict[str, Values] = {
        "ingest": {"ingest": whole["ingest"], **grading, **({"taught": taught} if taught else {})},
        "policy": {"policy": policy},
        "profile": {"profile": whole["profile"], **stored},
        "baseline": measured,
        "report": {"experiment": whole["experiment"], "report": whole["report"]},
    }
    for name in whole["recipes"]:
        recipe = cell_of(whole, name)
        train = recipe["train"]
        by_name[f"{name}/allocate"] = {
            "allocate": {**whole["allocate"], **recipe["allocate"]},
            "experiment": {"budget": whole["experiment"]["budget"]},
            "gates": whole["gates"],
            "sampling": whole["sampling"],
            **of_engine,
            "train": {
                # determines whether a slot reads the profile's samples
                **{slot: {"method": train[slot]["method"]} for slot in SLOTS},
                **{key: train[key] for key in FORECAST},
                "loss": {key: train["loss"].get(key) for key in ("method", "entropy")},
            },
        }
        engine = {key: whole["engine"][key] for key in SAMPLER} | altering
        inputs = recipes.input_digests(train)
        by_name[f"{name}/train"] = {"train": train, "engine": engine, **sampled, **inputs}
        by_name[f"{name}/evaluate"] = measured
    return by_name
