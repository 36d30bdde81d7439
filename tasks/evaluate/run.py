"""The stages `evaluate` and `baseline`: the trained or the initial policy on the test prompts."""

from tasks.common.files import read_json
from tasks.common.stage import Stage
from tasks.evaluate.evaluation import run_evaluation
from tasks.models.folder import policy_digest
from tasks.models.policy import open_policy, read_policy


def main(run: Stage) -> None:
    """Evaluate the policy of a recipe and a seed, or the initial policy."""
    if run.recipe is None:
        run_evaluation(run, read_policy(run.layout), run.layout.baseline)
        return
    recipe, seed = run.coordinates()
    trained = run.layout.train(recipe, seed) / "policy"
    policy = open_policy(trained, policy_digest(trained), read_json(run.layout.policy_card))
    run_evaluation(run, policy, run.layout.evaluation(recipe, seed))
