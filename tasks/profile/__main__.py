"""python -m tasks.profile: sample every training prompt a few times and count how often it is
solved."""

from tasks.common import parent

if __name__ == "__main__":
    parent.die_with_parent()
    from tasks.common import stage

    stage.run("tasks.profile.run")
