"""Make or fetch the initial policy: `python -m tasks.policy --params params.yaml --data data`."""

import logging
from pathlib import Path

from tasks.common.stage import Stage, run
from tasks.policy.making import Policy, provide

logger = logging.getLogger("tasks.policy")


def main(stage: Stage) -> None:
    settings = stage.section("policy", Policy)
    card = provide(settings, stage.layout)
    stage.tracker.params({"policy": stage.params["policy"]})
    stage.tracker.model("policy", Path(card["location"] or stage.layout.policy), card["digest"])
    logger.info(
        "policy %s: %s, %d parameters", card["digest"], card["architecture"], card["num_parameters"]
    )


if __name__ == "__main__":
    run("policy", main)
