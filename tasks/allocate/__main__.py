"""python -m tasks.allocate --recipe R --seed S: make the plan of a run from the profile."""

from tasks.common.processes import ending

if __name__ == "__main__":
    ending.begin_stage()
    from tasks.common import stage

    stage.run("tasks.allocate.run", of_cell=True)
