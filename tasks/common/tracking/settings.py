"""The section `tracking`."""

from typing import Literal

from tasks.common.params import ParamsError, settings
from tasks.common.redaction import has_credentials


@settings
class Tracking:
    """The section `tracking`: the MLflow server and other trackers that record runs."""

    uri: str | None = None  # null: sqlite under the data root; or http://...
    experiment: str = "winnow"  # the name in MLflow
    max_weights_gb: float = 1.0  # maximum size of a policy whose weights are kept; 0: none
    also: list[Literal["wandb", "tensorboard"]] = []  # other trackers

    def __post_init__(self) -> None:
        if self.uri is None:
            return
        if not self.uri.startswith(("sqlite:///", "http://", "https://")):
            raise ParamsError(  # without the value: it may contain a password
                "tracking.uri must be null, sqlite:///FILE, http://HOST:PORT or https://HOST"
            )
        if has_credentials(self.uri) or "?" in self.uri or "#" in self.uri:
            raise ParamsError(
                "tracking.uri contains credentials, a query string or a fragment, which would be "
                "stored and shown: remove them, and set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
