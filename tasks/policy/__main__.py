"""python -m tasks.policy: make or fetch the initial policy."""

from tasks.common.processes import ending

if __name__ == "__main__":
    ending.begin_stage()
    from tasks.common import stage

    stage.run("tasks.policy.run")
