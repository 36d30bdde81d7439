"""The stage `policy`: make the initial policy, or fetch it."""

import logging
from pathlib import Path

from tasks.common.stage import Stage
from tasks.policy.making import Policy, provide

logger = logging.getLogger("tasks.policy")


def main(stage: Stage) -> None:
    """Make or fetch the policy, and record it."""
    settings = stage.section("policy", Policy)
    card = provide(settings, stage.layout, copy=stage.options.copy)
    stage.tracker.params({"policy": stage.params["policy"]})
    stage.tracker.model("policy", Path(card["location"] or stage.layout.policy), card["digest"])
    logger.info(
        "policy %s: %s, %d parameters", card["digest"], card["architecture"], card["num_parameters"]
    )
