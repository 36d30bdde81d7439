"""Load the methods of a run: parse the section `train` as changed by the recipe, with all settings
of its methods, and report errors in their combination.

This module does not import torch, except through a method's file that imports it."""

import dataclasses
import importlib
import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import polars as pl

from tasks.common import recipes, registry
from tasks.common.params import ParamsError, Problems, gathered, listed, parse, settings
from tasks.train.data.plan import Plan
from tasks.train.data.profile import Profile
from tasks.train.needs import has_bonus
from tasks.train.settings import SLOTS, Spec, TrainSettings, with_method
from tasks.train.slots import Advantage, Control, Loss, Replay, Select, Slots

logger = logging.getLogger(__name__)


@settings
class NoSettings:
    """The empty settings of a method without settings."""


def train_settings(values: Mapping[str, Any], recipe: str) -> TrainSettings:
    """Return the section `train` as changed by the recipe. Raise ParamsError with all errors."""
    return settings_of(recipes.recipe(values, recipe)["train"])


def settings_of(train: Mapping[str, Any]) -> TrainSettings:
    """Return `train`, parsed and with the defaults of every slot's method. Raise ParamsError."""
    if not isinstance(train, dict):
        return parse(train, TrainSettings, "train")
    with gathered() as problems:
        parsed = problems.of(parse, train, TrainSettings, "train")
        specs = {
            slot: problems.of(completed, slot, with_method(slot, train.get(slot, {})))
            for slot in SLOTS
        }
        shape = [problems.of(completed, "shape", spec) for spec in getattr(parsed, "shape", [])]
    whole: TrainSettings = dataclasses.replace(parsed, **specs, shape=shape)
    check_slots(whole)
    return whole


def completed(slot: str, spec: Any) -> Spec:
    """Return a slot's mapping with the defaults of its method added."""
    module, own = method_of(slot, spec)
    settings = parse(own, getattr(module, "Settings", NoSettings), f"train.{slot}")
    return {"method": spec["method"], **dataclasses.asdict(settings)}


def class_of(slot: str, spec: Spec) -> Any:
    """Return the class of a slot's method."""
    return method_of(slot, spec)[0].Method


def method_of(slot: str, spec: Any) -> tuple[ModuleType, Spec]:
    """Return the module of a slot's method, and its settings as given, without `method`."""
    package = importlib.import_module(f"tasks.train.methods.{slot}")
    if not isinstance(spec, dict) or "method" not in spec:
        known = listed(registry.names(package))
        raise ParamsError(f"train.{slot}.method is missing; use one of {known}")
    own = {key: value for key, value in spec.items() if key != "method"}
    return registry.load(package, spec["method"], f"train.{slot}.method"), own


def check_slots(settings: TrainSettings) -> None:
    """Raise ParamsError if methods conflict with each other or with other settings."""
    estimate: type[Advantage] = class_of("advantage", settings.advantage)
    name = settings.advantage["method"]
    replays = settings.replay["method"] != "none"
    with gathered() as problems:
        if settings.batch.counts == "kept" and "keep" not in settings.select:
            problems.add(
                f"train.batch.counts is kept, but train.select {settings.select['method']} does "
                "not keep a fixed number of every group: set generated"
            )
        if settings.batch.counts == "kept" and replays:
            problems.add(
                "train.batch.counts is kept, but train.replay stores whole groups: set generated, "
                "or replay none"
            )
        skipping = [f"train.advantage {name}"] * estimate.skips_zeros
        skipping += [f"train.shape {each}" for each in shapes_with(settings, "skips_zeros")]
        if skipping and settings.divisor != "generated":
            problems.add(
                f"{skipping[0]} drops rollouts of advantage 0 from the loss, and with "
                "train.divisor kept the step would grow as fewer remain: set generated"
            )
        check_loss(settings, skipping, problems)
        changing = shapes_with(settings, "changes_rewards")
        if estimate.unshaped and changing:
            problems.add(
                f"train.advantage {name} needs the verifier's rewards, but train.shape "
                f"{listed(changing)} changes them: remove one of the two"
            )
        if estimate.fresh_only and replays:
            problems.add(
                f"train.advantage {name} compares a reward with earlier rollouts, which would "
                "include a replayed rollout itself: set train.replay none"
            )
        cutting = shapes_with(settings, "cuts_rows")
        if cutting and (wholes := needing_whole_rows(settings)):
            problems.add(
                f"train.shape {cutting[0]} trains on a part of each completion, but the loss needs "
                f"all of it with {listed(wholes)}: remove the shape, or change that setting"
            )
        check_selected(settings, problems)
        check_control(settings, problems)


def check_selected(settings: TrainSettings, problems: Problems) -> None:
    """Report shapes without effect, or with another weight, because `select` drops rollouts."""
    select, method = settings.select["method"], class_of("select", settings.select)
    acting = shapes_with(settings, "needs_equal")
    if acting and (method.drops_equal or settings.select.get("drop_dead")):
        problems.add(
            f"train.shape {acting[0]} acts on groups of failures, which train.select {select} "
            "drops: remove the shape, or select all"
        )
    dividing = shapes_with(settings, "needs_divisor")
    if dividing and select != "all" and {settings.divisor, settings.advantage_over} != {"kept"}:
        problems.add(
            f"train.shape {dividing[0]} is a mean over the tokens of the loss's divisor, but "
            f"train.select {select} drops some of them: set train.divisor and train.advantage_over "
            "to kept, or select all"
        )


def check_control(settings: TrainSettings, problems: Problems) -> None:
    """Report errors in the combination of control, replay and over-provisioning."""
    name, replay = settings.control["method"], settings.replay["method"]
    control: type[Control] = class_of("control", settings.control)
    replaying: type[Replay] = class_of("replay", settings.replay)
    if control.needs_stored != replaying.joins:
        problems.add(
            f"train.control is {name}, and train.replay {replay}: stored rollouts join groups only "
            "if the control is experience and the replay is successes"
        )
    if control.needs_stored and settings.over_provision > 1.0:
        problems.add(
            f"train.control {name} chooses groups of a step for stored rollouts, and "
            "train.over_provision moves groups to the next step: set over_provision to 1.0"
        )
    if control.reads_noise and (settings.max_staleness or settings.updates.is_several):
        problems.add(
            f"train.control {name} measures a step's only update before the next step: set "
            "train.max_staleness to 0, and train.updates.epochs and minibatches to 1"
        )
    asks_again = control.asks_again or settings.control.get("max_refills", 0) > 0
    if asks_again and settings.over_provision > 1.0:
        problems.add(
            f"train.control {name} may request more after a step's rollouts, but with "
            "train.over_provision the next step is requested before: set over_provision to 1.0"
        )


def needing_whole_rows(settings: TrainSettings) -> list[str]:
    """Return the settings that make a token's loss depend on its rollout's other tokens."""
    loss, correction = settings.loss, settings.correction
    reject = correction.reject
    keys = {
        f"train.loss.method {loss['method']}": not class_of("loss", loss).separable,
        "train.loss.penalty": loss.get("penalty", 0.0) > 0,
        "train.loss.ratio sequence": loss.get("ratio") == "sequence",
        "train.loss.normalize sequence": loss.get("normalize") == "sequence",
        f"train.correction.level {correction.level}": correction.level != "token",
        "train.correction.reject.whole_rows": reject is not None and reject.whole_rows,
        "train.correction.reject.level": reject is not None and reject.level != "token",
    }
    return [name for name, is_set in keys.items() if is_set]


def check_loss(settings: TrainSettings, skipping: list[str], problems: Problems) -> None:
    """Report errors in the combination of the loss, its reference and other settings."""
    goal: type[Loss] = class_of("loss", settings.loss)
    loss, source = settings.loss["method"], settings.reference.source
    reset = settings.reference.reset_every
    reading_all = {
        "train.kl_coefficient needs the KL of all: set it to 0": settings.kl_coefficient > 0,
        "train.loss.entropy needs the entropy of all: remove it": has_bonus(settings),
        f"train.loss {loss} trains on all: replace one of the two": goal.reads_reference,
    }
    for reason in [reason for reason, is_set in reading_all.items() if is_set and skipping]:
        problems.add(f"{skipping[0]} drops rollouts of advantage 0 from the loss, but {reason}")
    if goal.reads_reference and not goal.needs_teacher:
        moved = {
            "train.warm_start changes the policy before the first step: remove one of the two": (
                settings.warm_start is not None
            ),
            f"train.reference.source is {source}: set it to null": source is not None,
            f"train.reference.reset_every is {reset}: set it to null": reset is not None,
        }
        for reason in [reason for reason, is_set in moved.items() if is_set]:
            problems.add(
                f"train.loss {loss} compares the policy with the initial one, but {reason}"
            )
    masking = [f"train.shape {name}" for name in shapes_with(settings, "masks")]
    masking += ["train.correction.m2po"] * (settings.correction.m2po is not None)
    if goal.reads_reference and masking:
        problems.add(
            f"{masking[0]} sets advantages of tokens to 0, but train.loss {loss} also trains on "
            "those: remove it, or replace the loss"
        )
    has_old = settings.updates.is_several and settings.correction.ratio_to == "old"
    if goal.needs_several and not has_old:
        problems.add(
            f"train.loss {loss} has a penalty on the change since a batch's first update: set "
            "train.updates.epochs or minibatches above 1, and train.correction.ratio_to to old"
        )
    if goal.multiplies_weights and settings.correction.level != "token":
        problems.add(
            f"train.loss {loss} multiplies the weights of a completion's tokens, but "
            f"train.correction.level is {settings.correction.level}: set it to token"
        )
    if goal.needs_teacher and source is None:
        problems.add(f"train.loss {loss} needs a teacher: set train.reference.source to its folder")
    has_reference = goal.reads_reference or settings.kl_coefficient > 0
    for key in ("source", "reset_every"):
        if (value := getattr(settings.reference, key)) is not None and not has_reference:
            problems.add(
                f"train.reference.{key} is {value}, but nothing uses it: set train.loss.method to "
                f"distil, or train.kl_coefficient above 0, or {key} to null"
            )
    if reset is not None and (source is not None or settings.lora is not None):
        what = "a teacher" if source is not None else "the policy without its adapters"
        problems.add(
            f"train.reference.reset_every is {reset}, and the reference is {what}: set it to null"
        )


def shapes_with(settings: TrainSettings, flag: str) -> list[str]:
    """Return the names of the methods in `train.shape` whose class sets `flag`."""
    return [spec["method"] for spec in settings.shape if getattr(class_of("shape", spec), flag)]


def load_slots(
    settings: TrainSettings, plan: Plan, prompts: pl.DataFrame, profile: Profile | None = None
) -> Slots:
    """Return the method of every slot. `prompts` are the training prompts, a row each."""

    def load(slot: str, *arguments: Any) -> Any:
        spec = getattr(settings, slot)
        return load_method(slot, spec, *arguments, prompts=prompts, profile=profile)

    check_slots(settings)
    if settings.batch.counts == "kept":
        plan = dataclasses.replace(plan, keeps=settings.select["keep"])
    select: Select = load("select")
    estimate: Advantage = load("advantage")
    least = estimate.min_group
    if estimate.needs_group and (small := int((plan.group_sizes_V < least).sum())):
        logger.warning(
            "%d of %d visits have a group of %s, whose advantage is always 0",
            small,
            len(plan),
            "one" if least == 2 else f"fewer than {least}",
        )
    return Slots(
        load("control", plan),
        load("generate", len(prompts)),
        select,
        load("replay"),
        estimate,
        load("loss"),
        tuple(load_method("shape", spec, prompts=prompts) for spec in settings.shape),
    )


def load_method(
    slot: str,
    spec: Spec,
    *arguments: Any,
    prompts: pl.DataFrame | None = None,
    profile: Profile | None = None,
) -> Any:
    """Return an instance of `Method` in the slot's file `spec["method"]`, built from its settings,
    and from the training prompts and the profile if it reads them."""
    module, own = method_of(slot, spec)
    own_prompts = profile and profile.prompts
    for flag, value in (
        ("reads_prompts", prompts),
        ("encodes_prompts", own_prompts),
        ("reads_profile", profile),
    ):
        if getattr(module, flag, False):
            arguments = (*arguments, value)
    return make(module, "Method", own, f"train.{slot} ({spec['method']})", *arguments)


def make(
    module: ModuleType, name: str, values: Mapping[str, Any], where: str, *arguments: Any
) -> Any:
    """Return an instance of the class `name` of a method's module, built from `arguments`. If the
    module has `Settings`, they are parsed from `values` and become the first argument."""
    settings = parse(values, getattr(module, "Settings", NoSettings), where)
    if hasattr(module, "Settings"):
        arguments = (settings, *arguments)
    return getattr(module, name)(*arguments)
