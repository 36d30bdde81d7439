"""python -m tasks.evaluate --recipe R --seed S: a trained policy on the test prompts."""

from tasks.common import stage
from tasks.common.files import read_json
from tasks.sampling.evaluation import run_evaluation
from tasks.sampling.models import open_policy, policy_digest


def main(run: stage.Stage) -> None:
    recipe, seed = run.coordinates()
    trained = run.layout.train(recipe, seed) / "policy"
    policy = open_policy(trained, policy_digest(trained), read_json(run.layout.policy_card))
    run_evaluation(run, policy, run.layout.evaluation(recipe, seed))


if __name__ == "__main__":
    stage.run("evaluate", main, recipe=True, seed=True)
