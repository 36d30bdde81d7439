"""The stage `policy`: make the initial policy, or fetch it."""

import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.common.checksums import write_checked
from tasks.common.files import digest_file, temporary_folder
from tasks.common.layout import Layout
from tasks.common.stage import Stage
from tasks.engines.devices import first_gpus, held
from tasks.models.policy import torch_device
from tasks.policy.card import write_embedded, write_external, write_own
from tasks.policy.converted import write_converted
from tasks.policy.settings import Policy
from tasks.policy.source import is_embedded, resolve
from tasks.policy.tiny import make
from tasks.policy.training import Record
from tasks.train.settings import CheckpointSettings

logger = logging.getLogger("tasks.policy")


def main(stage: Stage) -> None:
    """Make or fetch the policy, and record it."""
    settings = stage.section("policy", Policy)
    supervised = settings.supervised
    every_seconds = stage.section("checkpoint", CheckpointSettings).every_seconds
    made = supervised or (settings.tiny if settings.source == "tiny" else None)
    device = torch_device(made.training.device if made else "cpu")

    def record(tokens: int, loss: float) -> None:
        stage.tracker.metrics({"policy_loss": loss}, step=tokens)

    with held(first_gpus(device, 1)):
        card = provide(settings, stage.layout, every_seconds=every_seconds, record=record)
    stage.tracker.metrics({"policy_flops": card.get("supervised", {}).get("flops")})
    stage.tracker.params({"policy": asdict(settings)})
    stage.tracker.model("policy", Path(card["location"] or stage.layout.policy), card["digest"])
    logger.info(
        "policy %s: %s, %d parameters", card["digest"], card["architecture"], card["num_parameters"]
    )


def provide(
    settings: Policy,
    layout: Layout,
    *,
    every_seconds: float = math.inf,
    record: Record | None = None,
) -> dict[str, Any]:
    """Copy or train the tiny policy, or fetch the external one, to `policy/`, after supervised
    training if `policy.supervised` is set. Write and return its card, `policy.json`. Training saves
    a checkpoint every `every_seconds`, and resumes from one that the same code saved. All
    checkpoints of the policy are deleted at the end."""
    unfinished, code = layout.unfinished_policy, layout.code("policy")
    if code.exists():
        unfinished = unfinished.with_stem(f"{unfinished.stem}-{digest_file(code)}")

    def write_base(folder: Path) -> dict[str, Any]:
        if settings.source == "tiny" and is_embedded(settings.tiny, code):
            return write_embedded(folder)
        if settings.source == "tiny":
            return write_own(*make(settings.tiny, unfinished, every_seconds), folder)
        if settings.is_converted:
            return write_converted(settings.source, folder)
        trusted, downloads = settings.trust_remote_code, layout.root / "policy_download"
        location = resolve(settings.source, downloads, trusted)
        return write_external(settings.source, location, trusted, folder)

    if settings.supervised is None:
        card = write_base(layout.policy)
    else:
        from tasks.policy.supervised import write_supervised

        with temporary_folder(layout.root, "policy") as temporary:
            own = temporary / "policy"
            base = write_base(own)
            card = write_supervised(
                settings.supervised,
                Path(base["location"] or own),
                base,
                layout.policy,
                unfinished.with_stem(f"{unfinished.stem}-supervised"),
                every_seconds,
                record,
            )
    write_checked(layout.policy_card, card)
    for path in layout.checkpoints.glob("policy*.safetensors"):
        path.unlink()
    return card
