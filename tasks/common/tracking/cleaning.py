"""Runs of MLflow that nothing refers to, and their removal by MLflow's own garbage collection."""

import contextlib
import io
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tasks.common.tracking.runs import DIGEST, connect


def unreferenced(
    uri: str, before: float, current: Collection[tuple[str, str]], policies: Collection[str]
) -> tuple[list[str], list[Path], Callable[[], None]]:
    """Return the runs that started before the time `before`, in seconds, and have ended; the
    folders of their artifacts and models; and a function that removes them. Excepted are runs of
    models with an alias (such as the champion) or the digest of one of `policies`, the latest run
    with each of the `current` files (key, digest), and the runs that contain an excepted one."""
    client = connect(uri)
    ids = [one.experiment_id for one in client.search_experiments()]
    runs = {run.info.run_id: run for run in pages(client.search_runs, ids)}  # the latest first
    models = list(pages(client.search_logged_models, ids))
    versions = list(pages(client.search_model_versions))
    named = {
        (m.name, str(n)) for m in client.search_registered_models() for n in m.aliases.values()
    }
    kept = {one.run_id for one in versions if (one.name, str(one.version)) in named}
    kept |= {one.source_run_id for one in models if one.tags.get("digest") in policies}
    found = set[tuple[str, ...]]()
    for name, run in runs.items():
        files = {file for file in files_of(run) if file[1:] in current} - found
        if run.info.status == "RUNNING" or run.info.start_time >= before * 1000 or files:
            kept.add(name)
        found |= files
    new = kept
    while new := {runs[one].data.tags.get("mlflow.parentRunId") for one in new & {*runs}} - kept:
        kept = kept | new
    old = [name for name in runs if name not in kept]
    models = [one for one in models if one.source_run_id in old]
    versions = [one for one in versions if one.run_id in old]
    uris = [runs[name].info.artifact_uri for name in old] + [m.artifact_location for m in models]
    folders = [Path(unquote(urlsplit(one).path)).parent for one in uris if one.startswith("file:")]
    return old, folders, partial(remove, client, old, [one.model_id for one in models], versions)


def files_of(run: Any) -> set[tuple[str, ...]]:
    """Return (kind, key, digest) of the files that a run wrote or reports (output, result)."""
    tags = [(*key.split(".", 2), value) for key, value in run.data.tags.items()]
    return {one[1:] for one in tags if one[0] == DIGEST and one[1] in ("output", "result")}


def remove(client: Any, runs: list[str], models: list[str], versions: list[Any]) -> None:
    """Delete runs, logged models and registered versions, and collect only these: the command
    `mlflow gc` would also purge the experiments that the user has deleted."""
    from mlflow.cli import _gc_tracking_resources

    for version in versions:
        client.delete_model_version(version.name, str(version.version))
    for model in models:
        client.delete_logged_model(model)
    for run in runs:
        client.delete_run(run)
    store = client._tracking_client.store
    with contextlib.redirect_stdout(io.StringIO()):  # a line for each run
        _gc_tracking_resources(store, runs, None, models, None, 0, True, False)


def pages(search: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield all results of one of the client's searches."""
    token = None
    while token != "":
        page = search(*arguments, page_token=token)
        yield from page
        token = page.token or ""
