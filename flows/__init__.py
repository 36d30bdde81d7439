"""Orchestration: Prefect manages order, retries and schedules; DVC, run as a subprocess, decides
which stages are up to date.

Telemetry of all libraries is off: the variables in QUIET are set here, before any module that reads
them is imported. Variables that the environment already sets keep their values."""

import os

QUIET = {
    "DVC_NO_ANALYTICS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # else each unsent event is printed
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}

HEARTBEAT_SECONDS = 30  # interval of a flow run's heartbeats; three missed ones mean a crash
QUIET["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] = str(HEARTBEAT_SECONDS)

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
