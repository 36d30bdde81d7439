"""python -m tasks.allocate --recipe R --seed S: make the plan of a run from the profile."""

from tasks.common import parent

if __name__ == "__main__":
    parent.die_with_parent()
    from tasks.common import stage

    stage.run("tasks.allocate.run", of_cell=True)
