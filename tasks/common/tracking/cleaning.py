"""Runs of MLflow that nothing refers to, and their removal by MLflow's own garbage collection."""

from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tasks.common.tracking.runs import DIGEST, connect, follow_project


def unreferenced(
    uri: str, before: float, current: Collection[tuple[str, str]], policies: Collection[str]
) -> tuple[list[str], list[Path], Callable[[], None]]:
    """Return the runs that started before the time `before`, in seconds, and have ended; the
    folders of their artifacts and models; and a function that removes them. Excepted are runs of
    models with an alias (such as the champion) or the digest of one of `policies`, the latest run
    with each of the `current` files (key, digest), and the runs that contain an excepted one."""
    client = connect(uri)
    experiments = list(pages(client.search_experiments))
    for one in experiments:  # else a copy of a project would remove the original's files
        follow_project(uri, one.artifact_location)
    ids = [one.experiment_id for one in experiments]
    runs = {run.info.run_id: run for run in pages(client.search_runs, ids)}  # the latest first
    tags = {name: run.data.tags for name, run in runs.items()}
    models = list(pages(client.search_logged_models, ids))
    wrote = {tag: name for name in reversed(tags) for tag in tags[name].items()}
    kinds = ("output", "result")
    kept = {wrote.get((f"{DIGEST}.{kind}.{key}", md5)) for kind in kinds for key, md5 in current}
    kept |= {
        name
        for name, run in runs.items()
        if run.info.status == "RUNNING" or run.info.start_time >= before * 1000
    }
    kept |= {
        client.get_model_version_by_alias(model.name, alias).run_id
        for model in pages(client.search_registered_models)
        for alias in model.aliases
    }
    kept |= {one.source_run_id for one in models if one.tags.get("digest") in policies}
    new = kept
    while new := {tags[one].get("mlflow.parentRunId") for one in new & {*runs}} - kept:
        kept = kept | new
    old = [name for name in runs if name not in kept]
    models = [one for one in models if one.source_run_id in old]
    uris = [runs[name].info.artifact_uri for name in old] + [m.artifact_location for m in models]
    folders = [Path(unquote(urlsplit(one).path)).parent for one in uris if one.startswith("file:")]
    return old, folders, partial(remove, client, old, [one.model_id for one in models])


def remove(client: Any, runs: list[str], models: list[str]) -> None:
    """Delete runs, logged models and registered versions, and collect only these: the command
    `mlflow gc` would also purge the experiments that the user has deleted."""
    from mlflow.cli import _gc_tracking_resources

    for version in list(pages(client.search_model_versions)):
        if version.run_id in runs:
            client.delete_model_version(version.name, str(version.version))
    for model in models:
        client.delete_logged_model(model)
    for run in runs:
        client.delete_run(run)
    with redirect_stdout(None):  # a line for each run
        store = client._tracking_client.store
        _gc_tracking_resources(store, runs, None, models, None, 0, True, False)


def pages(search: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield all results of one of the client's searches."""
    token = None
    while token != "":
        page = search(*arguments, page_token=token)
        yield from page
        token = page.token or ""
