"""The reserved places on a cluster: one for every training process, then one for every server.

The command that starts the training run reserves all of them together, so that trainers and servers
never wait for each other's places. A stage that only samples reserves places only for servers."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.common.files import ArtifactError, temporary_folder, writing
from tasks.engines.cluster.hosts import Places, RemoteHost, connect
from tasks.engines.settings import Cluster, EngineSettings

RESERVE_SECONDS = 300.0


def reserve_places(settings: EngineSettings, cluster: Cluster, num_trainers: int = 0) -> Places:
    """Reserve places for trainers, if any, then for servers, with GPUs if the cluster has any and
    engine.device allows them. Raise ArtifactError if the cluster cannot provide all places within
    RESERVE_SECONDS."""
    address, ray = cluster.ray, connect(cluster.ray)
    there: Mapping[str, float] = ray.cluster_resources()
    has_gpus = settings.device != "cpu" and there.get("GPU", 0) > 0
    sizes = [1] * num_trainers + [cluster.gpus_per_engine] * cluster.engines
    bundles: list[dict[str, float]] = [
        {"CPU": settings.threads, **({"GPU": num_gpus} if has_gpus else {})} for num_gpus in sizes
    ]
    for kind in ("CPU", "GPU"):
        requested = sum(bundle.get(kind, 0) for bundle in bundles)
        if requested > there.get(kind, 0):
            raise ArtifactError(
                f"engine.cluster requests {requested:.0f} {kind}s, but the Ray cluster at "
                f"{address} has {there.get(kind, 0):.0f}: lower engine.cluster.trainers or "
                "engines, or add machines"
            )
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not group.wait(RESERVE_SECONDS):
        ray.util.remove_placement_group(group)
        raise ArtifactError(
            f"the Ray cluster at {address} had no room for {len(bundles)} processes in "
            f"{RESERVE_SECONDS:.0f} s: it is in use, or no machine has {bundles[-1]}"
        )
    return Places(address, ray, group, bundles)


@contextmanager
def shared_folder(cluster: Cluster, name: str) -> Iterator[Path]:
    """Yield a temporary folder in the folder `engine.cluster.shared`. Raise WriteError if that is
    not writable."""
    shared = Path(cluster.shared).resolve()
    with ExitStack() as stack:
        with writing(shared):
            folder = stack.enter_context(temporary_folder(shared, name))
        yield folder


def check_shared(host: RemoteHost, folder: Path) -> None:
    """Raise ArtifactError, with the machine's name, if the host's machine cannot read `folder`. The
    folder's name is random, so no other folder has the same path."""
    if not host.call("has_folder", str(folder)):
        raise ArtifactError(
            f"{host.place().machine} cannot read {folder.parent}: engine.cluster "
            "needs a folder that all machines of the cluster share under the same path. The "
            "project, its environment and the data root must also be shared"
        )
