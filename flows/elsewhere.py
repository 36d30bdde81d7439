"""A stage on another machine, as its sender sees it: `--on train=gpu-pool`.

The code goes by git, the data by DVC's remote, and the entry of dvc.lock comes back. The stage is a
flow run of the work pool's deployment (see `flows.sent`), in another checkout of the project at the
same commit. Afterwards everything is as if the stage had run here."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter
from prefect.client.schemas.filters import FlowRunFilterId as Id
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from flows import commands, lock, selection
from flows.sent import ARTIFACT, FLOW
from flows.stages import StageFailed, Stages
from tasks.common import params

POLL_SECONDS = 1.0
QUIET_SECONDS = 30.0  # without a worker, before a word about it
OWN = ("dvc.lock", "params.yaml", "data/report")  # may differ from the commit: they are sent along


class SendError(commands.CommandError):
    """A stage cannot be sent; the message says why and what to do."""


def prepare(on: Mapping[str, str], stages: Stages) -> None:
    """Have the stages of the kinds in `on` run by the workers of these pools. Raises SendError
    where none of them could be sent."""
    kinds = {params.coordinates(stage)[0] for stage in stages.needs}
    selection.choose(sorted(kinds), on, "stage")
    for kind in on:
        check_outputs(kind)
    wanted = {stage: on.get(params.coordinates(stage)[0]) for stage in stages.ordered}
    if stages.idle or not any(wanted.values()):
        return
    check_tree()
    commit = commands.git("rev-parse", "HEAD")
    with get_client(sync_client=True) as client:
        found = {pool: deployment(client, pool) for pool in set(on.values())}
    stages.elsewhere = {
        stage: partial(run, stages, stage, pool, found[pool], commit)
        for stage, pool in wanted.items()
        if pool
    }


def check_outputs(kind: str) -> None:
    """Raise SendError for a stage with outputs that DVC does not cache, and so cannot fetch."""
    outs = params.load(commands.ROOT / "dvc.yaml")["stages"][kind]["outs"]
    kept = [name for out in outs if isinstance(out, dict) for name in out]
    if kept or kind == "code":
        raise SendError(
            f"{kind} runs where the flow does: {kept[0] if kept else 'the code'} is kept in git or "
            "made from it, and comes back by no `dvc pull`"
        )


def check_tree() -> None:
    """Raise SendError where the other machine could not have this code."""
    changed = commands.git("status", "--porcelain", "--", ".", *(f":!{path}" for path in OWN))
    if changed:
        raise SendError(
            f"{changed.splitlines()[0][3:]} is not as committed, and a stage that is sent to a "
            "work pool brings its code by git: commit it, push, and run again"
        )


def deployment(client: SyncPrefectClient, pool: str) -> UUID:
    """The deployment that a worker of the pool has registered."""
    try:
        return client.read_deployment_by_name(f"{FLOW}/{pool}").id
    except ObjectNotFound as error:
        raise SendError(
            f"no worker has ever offered itself to the work pool {pool}: on the other machine, in "
            f"its checkout, with the same PREFECT_API_URL: python -m flows.worker --pool {pool}"
        ) from error


def run(
    stages: Stages, stage: str, pool: str, target: UUID, commit: str, dvc: commands.Dvc
) -> None:
    """Have a worker run the stage, and take its outputs and its entry of dvc.lock. Raises
    StageFailed where it did not succeed there."""
    needs = sorted(stages.needs[stage])
    dvc.look("--wait-for-lock", "push", *needs)
    upstream = selection.upstream(stages.needs, [stage])
    with commands.whole_lock() as path:
        known = lock.chosen(path.read_text(), upstream)
    parameters = {
        "stage": stage,
        "commit": commit,
        "parameters": (commands.ROOT / "params.yaml").read_text(),
        "locked": known,
        "force": stage in stages.forced,
    }
    with get_client(sync_client=True) as client:
        sent = client.create_flow_run_from_deployment(target, parameters=parameters, name=stage)
        stages.say(stage, f"sent to the work pool {pool}", f"flow run {sent.id}")
        state = outcome(client, sent.id, lambda: dvc.is_ended, partial(stages.say, stage))
        if not state.is_completed():
            raise StageFailed(f"on {pool}: {state.name}: {state.message}")
        entry = returned(client, sent.id, stage)
    with commands.whole_lock(to_write=True) as path:
        lock.write(path, lock.with_entry(path.read_text(), stage, entry))
    dvc.look("--wait-for-lock", "pull", "--force", stage)
    if changes := dvc.status(stage).get(stage):
        why = stages.reason(stage, changes)
        raise StageFailed(f"on {pool} it ran from other inputs than stand here: {why}")


def outcome(
    client: SyncPrefectClient, sent: UUID, is_ended: Callable[[], bool], say: Callable[[str], None]
) -> State:
    """The final state of the flow run. Where this flow is interrupted meanwhile, it is cancelled:
    the stage saves what it has, there."""
    began, said = time.monotonic(), False
    try:
        while True:
            state = client.read_flow_run(sent).state
            if state and state.is_final():
                return state
            if is_ended():
                raise KeyboardInterrupt
            waited = time.monotonic() - began
            if state and state.is_scheduled() and waited > QUIET_SECONDS and not said:
                said = True
                say(f"waits: no worker has taken it for {waited:.0f} s")
            time.sleep(POLL_SECONDS)
    except BaseException:
        client.set_flow_run_state(sent, Cancelling())
        raise


def returned(client: SyncPrefectClient, sent: UUID, stage: str) -> str:
    """The stage's entry of dvc.lock, as its flow run left it."""
    found = client.read_artifacts(
        artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[ARTIFACT])),
        flow_run_filter=FlowRunFilter(id=Id(any_=[sent])),
    )
    entry = str(json.loads(str(found[0].data))) if found else ""
    if list(lock.entries(entry)) != [stage]:
        raise StageFailed(f"flow run {sent} has ended without the entry for dvc.lock")
    return entry
