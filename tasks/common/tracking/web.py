"""MLflow's pages for a database in a file. Unlike MLflow's own command, they take no artifacts by
proxy, which anybody who reaches the port could write to `mlartifacts/` of the current folder."""

from typing import Any

from tasks.common.tracking.runs import artifacts_beside


def environment(uri: str) -> dict[str, str]:
    """Return the environment of `application` for the database `uri`. MLflow's own command passes
    its options in these variables."""
    return {
        "_MLFLOW_SERVER_FILE_STORE": uri,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": artifacts_beside(uri).as_uri(),  # of new experiments
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "false",
    }


def application() -> Any:
    """Return MLflow's application (ASGI), after creating the database if it is missing."""
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores()
    return app
