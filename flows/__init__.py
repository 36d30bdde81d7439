"""Orchestration: Prefect owns order, retries and schedules; DVC, run as a subprocess, owns what is
up to date.

Nothing here phones home. The switches stand before anything is imported that reads them. A
value that the environment has already stays."""

import os

QUIET = {
    "DVC_NO_ANALYTICS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # else each event that is not sent is printed
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}

HEARTBEAT_SECONDS = 30  # of a flow run, after three of which without a word it has crashed
QUIET["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] = str(HEARTBEAT_SECONDS)

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
