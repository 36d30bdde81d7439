"""python -m tasks.evaluate [--recipe R --seed S]: measure a trained policy on the test prompts, or
without a recipe the initial policy, the baseline of every trained policy."""

from tasks.common import stage
from tasks.common.files import read_json
from tasks.evaluate.evaluation import run_evaluation
from tasks.models.policy import open_policy, policy_digest, read_policy


def main(run: stage.Stage) -> None:
    """Evaluate the policy of a recipe and a seed, or the initial policy."""
    if run.recipe is None:
        run_evaluation(run, read_policy(run.layout), run.layout.baseline)
        return
    recipe, seed = run.coordinates()
    trained = run.layout.train(recipe, seed) / "policy"
    policy = open_policy(trained, policy_digest(trained), read_json(run.layout.policy_card))
    run_evaluation(run, policy, run.layout.evaluation(recipe, seed))


if __name__ == "__main__":
    stage.run("evaluate", main, recipe=True, seed=True, alone="baseline")
