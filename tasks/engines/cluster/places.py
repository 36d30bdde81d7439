"""What is reserved on a cluster: a place for every process that trains, then one for every server.

The command that starts the training reserves all of them together, so that no half of it waits for
the other. A stage that samples alone reserves places for servers."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.common.files import ArtifactError, temporary_folder, writing
from tasks.engines.cluster.hosts import Places, RemoteHost, connect, reserve
from tasks.engines.settings import Cluster, EngineSettings


def training_places(settings: EngineSettings, cluster: Cluster) -> Places:
    """Places for trainers and servers, in this order."""
    bundles = [bundle(settings, cluster, 1)] * cluster.trainers
    bundles += [bundle(settings, cluster, cluster.gpus_per_engine)] * cluster.engines
    return reserve(cluster.ray, bundles)


def engine_places(settings: EngineSettings, cluster: Cluster) -> Places:
    """Places for servers alone."""
    bundles = [bundle(settings, cluster, cluster.gpus_per_engine)] * cluster.engines
    return reserve(cluster.ray, bundles)


def bundle(settings: EngineSettings, cluster: Cluster, num_gpus: int) -> dict[str, float]:
    """What one process needs: GPUs where the cluster has some and engine.device allows them."""
    ray = connect(cluster.ray)
    has_gpus = settings.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    return {"CPU": settings.threads, **({"GPU": num_gpus} if has_gpus else {})}


@contextmanager
def shared_folder(cluster: Cluster, name: str) -> Iterator[Path]:
    """A temporary folder in `engine.cluster.shared`. Raises WriteError where that cannot be
    written."""
    shared = Path(cluster.shared).resolve()
    with ExitStack() as stack:
        with writing(shared):
            folder = stack.enter_context(temporary_folder(shared, name))
        yield folder


class SharedFolder:
    """A file in `engine.cluster.shared`, by which a machine shows that it sees the same folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self.content = folder / "seen", uuid.uuid4().hex
        self.path.write_text(self.content)

    def check(self, host: RemoteHost) -> None:
        """Raise ArtifactError naming the machine that does not see it."""
        if not host.call("reads", str(self.path), self.content):
            raise ArtifactError(
                f"{host.place().machine} does not see {self.path.parent.parent}: engine.cluster "
                "needs a folder that all machines of the cluster share, under the same path; the "
                "project, its environment and the data root must be on one, too"
            )
