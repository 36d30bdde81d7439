"""The policy and the settings behind a cell's numbers, from what each stage noted. A stage that
runs again leaves the files of later stages: new weights beside the evaluation of former ones."""

from pathlib import Path
from typing import Any

from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout

TRAINED = ("recipe", "seed", "train", "sampling", "engine", "verify", "budget")


def require_same(path: Path, what: str, noted: str, now: str) -> None:
    """Raise ArtifactError unless the digest of `what` that the file `path` notes is still `now`."""
    if noted != now:
        raise ArtifactError(
            f"{path} is of another {what} ({noted}) than the present one ({now}): bring it up to "
            "date with `winnow run`"
        )


def metrics_of(card: Path, folder: Path) -> dict[str, Any]:
    """Return the metrics on test in `folder`. Raise ArtifactError unless they are of the policy
    that the file `card` names."""
    metrics, digest = read_checked(folder / "metrics.json"), read_checked(card)["digest"]
    require_same(folder / "metrics.json", "policy", metrics["policy"], digest)
    return metrics


def settings_of(layout: Layout, recipe: str, seed: int) -> dict[str, Any]:
    """Return the settings with which a cell was profiled, allocated, trained and evaluated."""
    trained = read_checked(layout.train(recipe, seed) / "settings.json")
    of_stages = {
        "profile": layout.profile / "summary.json",
        "allocate": layout.plan(recipe, seed) / "forecast.json",
        "evaluate": layout.evaluation(recipe, seed) / "metrics.json",
    }
    found = {stage: read_checked(path)["settings"] for stage, path in of_stages.items()}
    return found | {name: trained[name] for name in TRAINED}
