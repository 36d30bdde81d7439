"""The stages `evaluate` and `baseline`: measure the trained or initial policy on test prompts."""

import shutil

from tasks.common.stage import Stage
from tasks.evaluate.evaluation import run_evaluation
from tasks.models.policy import read_policy, read_trained


def main(run: Stage) -> None:
    """Evaluate the policy of a recipe and a seed, or the initial policy."""
    if run.recipe is None:
        run_evaluation(run, read_policy(run.layout), run.layout.baseline)
        return
    recipe, seed = run.coordinates()
    policy = read_trained(run.layout, recipe, seed)
    shutil.rmtree(run.layout.unrecorded(recipe, seed), ignore_errors=True)  # no longer needed
    run_evaluation(run, policy, run.layout.evaluation(recipe, seed))
