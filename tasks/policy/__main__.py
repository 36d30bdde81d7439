"""python -m tasks.policy: make or fetch the initial policy."""

from tasks.common import stage

if __name__ == "__main__":
    stage.run("tasks.policy.run")
