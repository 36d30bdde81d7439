"""The reference of a KL term or loss: the initial policy (until reset) or a teacher.

A teacher must have the trained policy's vocabulary, because it reads that policy's token ids."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tasks.common.accounting.ledger import Architecture
from tasks.common.files import ArtifactError
from tasks.models.adapters import has_adapters
from tasks.models.forward_check import check_forward
from tasks.models.policy import Policy, architecture_of, describe, load_model, load_tokenizer
from tasks.train.needs import has_reference
from tasks.train.settings import LearnerSettings, TrainSettings


def make_reference(
    model: PreTrainedModel,
    policy: Policy,
    settings: TrainSettings,
    memory: LearnerSettings,
    shard: Callable[[PreTrainedModel], object] | None,
) -> tuple[PreTrainedModel | None, Architecture]:
    """Return the reference and its architecture; without a reference, None and the policy's. The
    initial policy is a copy of `model`; with adapters it is `model` itself, used with its adapters
    turned off. With `shard` the reference is sharded (see `load_model`). Raise ArtifactError for a
    teacher that cannot be loaded, or has another vocabulary."""
    if not has_reference(settings):
        return None, policy.architecture
    load = partial(
        load_model,
        dtype=torch.float32,
        device=model.device,
        trust_remote_code=policy.trust_remote_code,
        shard=shard,
    )
    folder = settings.reference.folder
    if folder is None:
        if has_adapters(model):
            return model, policy.architecture
        own = load(policy.folder) if shard is not None else copy.deepcopy(model)
        return own.requires_grad_(False), policy.architecture
    if not folder.is_dir():
        raise ArtifactError(
            f"train.reference.source: {folder} is not a folder: name the folder of the teacher, "
            "such as the snapshot of a hub's model"
        )
    check_vocabulary(policy, folder, "train.reference.source: the teacher")
    teacher = load(folder)
    check_forward(teacher, packed=memory.share_prompts)
    return teacher.requires_grad_(False), architecture_of(describe(teacher))


def check_vocabulary(policy: Policy, other: Path, what: str) -> None:
    """Raise ArtifactError unless the policy in the folder `other` has the same vocabulary. The
    message begins with `what`."""
    mine, theirs = (
        load_tokenizer(folder, trust_remote_code=policy.trust_remote_code).get_vocab()
        for folder in (policy.folder, other)
    )
    differ = sorted(t for t in mine.keys() | theirs.keys() if mine.get(t) != theirs.get(t))
    if differ:
        raise ArtifactError(
            f"{what} in {other} has another vocabulary than the policy in {policy.folder} "
            f"({len(differ)} tokens differ, such as {differ[0]!r}), but must share its token ids: "
            "use one with the same tokenizer"
        )
