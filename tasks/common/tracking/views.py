"""MLflow's page of runs as Winnow opens it. MLflow keeps a saved view in a tag of the experiment:
the state of that page, in MLflow's own names."""

import json

VIEW = "recipes"  # the view is written once, so a user's change lasts: new content needs a new name
TAG = f"mlflow.sharedViewState.{VIEW}"
PATH = f"#/experiments/{{}}/runs?viewStateShareKey={VIEW}&workflowType=machine_learning"
COLUMNS = {  # and their widths in pixels
    **{"metrics.`pass_at_1`": 90, "metrics.`flops_executed`": 130, "metrics.`flops_charged`": 130},
    **{"metrics.`seconds`": 80, "attributes.`Dataset`": 200},
}
X, Y = ({"key": name, "type": "METRIC"} for name in ("flops_executed", "pass_at_1"))
CHARTS: list[dict[str, object]] = [
    {"type": "SCATTER", "xaxis": X, "yaxis": Y},
    {"type": "LINE", "metricKey": "by_gflops/validation_accuracy", "lineSmoothness": 0},
    {"type": "LINE", "metricKey": "by_gflops/reward_mean", "lineSmoothness": 70},
]
CARD = {"metricSectionId": VIEW, "yAxisKey": "metric"}
STATE = {  # a row for each recipe and seed: MLflow nests rows only if they are sorted by time
    "searchFilter": "tags.kind = 'cell'",
    "orderByKey": "metrics.`pass_at_1`",
    "orderByAsc": False,
    "selectedColumns": [*COLUMNS],
    "columnOrder": [*COLUMNS],
    "columnWidths": COLUMNS,
    "compareRunSections": [{"uuid": VIEW, "name": "Recipes", "display": True}],
    "compareRunCharts": [{**CARD, "uuid": str(n), **one} for n, one in enumerate(CHARTS)],
    "runsHiddenMode": "SHOW_ALL",  # the charts have those that still train, which are last
    "isAccordionReordered": True,  # else the sections of other metrics are first
}
TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    TAG: json.dumps({"name": "Recipes", "createdAt": 0, "state": json.dumps(STATE)}),
}
# what a new browser stores: the pages for training instead of those for agents, no panel of an
# assistant, and no notice of telemetry, which is off
SCRIPT = """<script>for (const [key, value] of [
["mlflow.workflowType_v1", '"machine_learning"'],
["mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true"],
["mlflow.telemetry.info.alert.dismissed_v1", "true"],
]) if (localStorage.getItem(key) === null) localStorage.setItem(key, value)</script>"""
