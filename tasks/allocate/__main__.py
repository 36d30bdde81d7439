"""python -m tasks.allocate --recipe R: make the recipe's plan from the profile."""

from tasks.common import stage

if __name__ == "__main__":
    stage.run("tasks.allocate.run", recipe=True)
