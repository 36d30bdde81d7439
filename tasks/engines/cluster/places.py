"""The reserved places on a cluster: one for every training process, then one for every server.

The command that starts the training reserves all of them together, so that trainers and servers
never wait for each other's places. A stage that only samples reserves places for servers."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.common.files import ArtifactError, temporary_folder, writing
from tasks.engines.cluster.hosts import Places, RemoteHost, connect, reserve
from tasks.engines.settings import Cluster, EngineSettings


def reserve_places(settings: EngineSettings, cluster: Cluster, num_trainers: int = 0) -> Places:
    """Reserve places for trainers, if any, and servers, in this order, with GPUs if the cluster has
    some and engine.device allows them."""
    ray = connect(cluster.ray)
    has_gpus = settings.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    sizes = [1] * num_trainers + [cluster.gpus_per_engine] * cluster.engines
    bundles: list[dict[str, float]] = [
        {"CPU": settings.threads, **({"GPU": num_gpus} if has_gpus else {})} for num_gpus in sizes
    ]
    return reserve(cluster.ray, bundles)


@contextmanager
def shared_folder(cluster: Cluster, name: str) -> Iterator[Path]:
    """Create a temporary folder in `engine.cluster.shared`. Raise WriteError if that is not
    writable."""
    shared = Path(cluster.shared).resolve()
    with ExitStack() as stack:
        with writing(shared):
            folder = stack.enter_context(temporary_folder(shared, name))
        yield folder


class SharedFolder:
    """A file in `engine.cluster.shared`, to check that machines share the folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self.content = folder / "seen", uuid.uuid4().hex
        self.path.write_text(self.content)

    def check(self, host: RemoteHost) -> None:
        """Raise ArtifactError with the machine's name if the machine cannot read the file."""
        if not host.call("reads", str(self.path), self.content):
            raise ArtifactError(
                f"{host.place().machine} cannot read {self.path.parent.parent}: engine.cluster "
                "needs a folder that all machines of the cluster share under the same path. The "
                "project, its environment and the data root must also be shared"
            )
