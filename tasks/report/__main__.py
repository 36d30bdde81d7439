"""python -m tasks.report: compare what all recipes and seeds reached and cost."""

from tasks.common import stage

if __name__ == "__main__":
    stage.run("tasks.report.run")
