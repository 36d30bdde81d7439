"""python -m tasks.profile: sample every training prompt a few times and count how often it is
solved."""

from tasks.common import stage

if __name__ == "__main__":
    stage.run("tasks.profile.run")
