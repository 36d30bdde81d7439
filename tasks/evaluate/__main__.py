"""python -m tasks.evaluate [--recipe R --seed S]: measure a trained policy on the test prompts.
Without a recipe, measure the initial policy, which is the baseline of every trained policy."""

from tasks.common.processes import ending

if __name__ == "__main__":
    ending.begin_stage()
    from tasks.common import stage

    stage.run("tasks.evaluate.run", of_cell=True, alone="baseline")
