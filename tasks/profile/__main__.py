"""python -m tasks.profile: sample every training prompt a few times, and count the correct
samples."""

from tasks.common.processes import ending

if __name__ == "__main__":
    ending.begin_stage()
    from tasks.common import stage

    stage.run("tasks.profile.run")
