"""The needs of a recipe's section `train`: passes over rollouts, a reference, the profile.

They follow from the settings and from the declarations in the methods' files. Neither a method nor
torch is imported."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.common import registry
from tasks.common.params import parse
from tasks.models.folder import num_parameters
from tasks.train.settings import SLOTS, Entropy, Spec, TrainSettings, with_method

METHODS = Path(__file__).parent / "methods"


def read_train(train: Mapping[str, Any]) -> TrainSettings:
    """Return a section `train` as settings, with the constant defaults of every slot's method.
    Raise ParamsError if it is invalid; settings of methods are not checked."""
    settings = parse(train, TrainSettings, "train")
    given = {slot: with_method(slot, getattr(settings, slot)) for slot in SLOTS}
    slots: Spec = {
        slot: {**registry.defaults(file_of(slot, spec)), **spec} for slot, spec in given.items()
    }
    return replace(settings, **slots)


def declared(slot: str, spec: Spec, name: str) -> Any:
    """Return the constant that the file of a slot's method assigns to `name`, or None."""
    return registry.declared(file_of(slot, spec), name)


def file_of(slot: str, spec: Spec) -> Path:
    return METHODS / slot / f"{spec['method']}.py"


def profile_readers(train: TrainSettings) -> list[str]:
    """Return the keys of `train` that read the profile's samples: slots whose method reads them,
    and `warm_start` if its data is the profile."""
    warm = train.warm_start is not None and train.warm_start.data == "profile"
    found = [slot for slot in SLOTS if declared(slot, getattr(train, slot), "reads_profile")]
    return ["warm_start"] * warm + found


def has_reference(train: TrainSettings) -> bool:
    """Return whether the KL term or the loss needs a reference policy's log-probabilities."""
    return train.kl_coefficient > 0.0 or bool(declared("loss", train.loss, "reads_reference"))


def reference_parameters(train: TrainSettings, own: int) -> int:
    """Return the number of parameters of the reference; 0 without one. It is the teacher's, or
    `own` for the initial policy and for a teacher that is not on this machine."""
    if not has_reference(train):
        return 0
    folder = train.reference.folder
    return own if folder is None else num_parameters(folder) or own


def has_bonus(train: TrainSettings) -> bool:
    """Return whether the loss has a bonus for the policy's entropy."""
    return parse(train.loss.get("entropy") or {}, Entropy, "train.loss.entropy").is_on


def num_scorings(train: TrainSettings, *, has_features: bool = False) -> int:
    """Return the number of passes over a step's rollouts before its first update: one for the
    policy's own log-probabilities, if `reads_policy` or a slot `has_features` of it, and one for a
    proximal policy."""
    is_proximal = train.correction.proximal is not None
    return int(train.reads_policy or has_features) + int(is_proximal)


def num_stored(train: TrainSettings) -> float:
    """Return the most stored rollouts per group that are scored to choose those which join: the
    control declares which setting is the share of such groups, and the replay which one is their
    number of candidates. A single candidate is not scored."""
    share = declared("control", train.control, "stored_share")
    candidates = declared("replay", train.replay, "stored_candidates")
    if share is None or candidates is None or train.replay[candidates] < 2:
        return 0.0
    return float(train.control[share] * train.replay[candidates])
