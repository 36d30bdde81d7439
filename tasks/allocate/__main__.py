"""python -m tasks.allocate --recipe R --seed S: make the plan of a run from the profile."""

from tasks.common import stage

if __name__ == "__main__":
    stage.run("tasks.allocate.run", recipe=True, seed=True)
