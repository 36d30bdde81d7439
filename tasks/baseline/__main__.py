"""python -m tasks.baseline: the initial policy on the test prompts, the mark every trained policy is held against."""

from tasks.common import stage
from tasks.sampling.evaluation import run_evaluation
from tasks.sampling.models import read_policy


def main(run: stage.Stage) -> None:
    run_evaluation(run, read_policy(run.layout), run.layout.baseline)


if __name__ == "__main__":
    stage.run("baseline", main)
