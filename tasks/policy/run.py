"""The stage `policy`: make the initial policy, or fetch it."""

import logging
from dataclasses import asdict
from pathlib import Path

from tasks.common.stage import Stage
from tasks.engines.devices import first_gpus, held
from tasks.models.policy import torch_device
from tasks.policy.making import provide
from tasks.policy.settings import Policy
from tasks.train.settings import CheckpointSettings

logger = logging.getLogger("tasks.policy")


def main(stage: Stage) -> None:
    """Make or fetch the policy, and record it."""
    settings = stage.section("policy", Policy)
    every_seconds = stage.section("checkpoint", CheckpointSettings).every_seconds
    is_made = settings.source == "tiny"
    device = torch_device(settings.tiny.training.device if is_made else "cpu")
    with held(first_gpus(device, 1)):
        card = provide(settings, stage.layout, copy=stage.options.copy, every_seconds=every_seconds)
    stage.tracker.params({"policy": asdict(settings)})
    stage.tracker.model("policy", Path(card["location"] or stage.layout.policy), card["digest"])
    logger.info(
        "policy %s: %s, %d parameters", card["digest"], card["architecture"], card["num_parameters"]
    )
