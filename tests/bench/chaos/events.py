"""What happens in an event, drawn from the seed and the event's number alone."""

import random
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.chaos.world import FLOW, STAGES, World, direct, repro

KINDS = {  # how often, in parts
    "kill": 52,
    "kill at a time": 14,
    "interrupt": 4,
    "container": 6,
    "full disk": 12,
    "full file system": 4,
    "flip": 5,
    "gc": 4,
    "beside": 4,
    "bucket": 5,
}
WORDS = {  # of each kind what happens, and what the user sees and does
    "kill": (
        "SIGKILL of the flow, dvc, a stage, one of its processes, or all, at an operation on a "
        "file, up to three times in a row",
        "the run ends; the same command goes on",
    ),
    "kill at a time": (
        "the same after a number of seconds, imports included",
        "the run ends; the same command goes on",
    ),
    "interrupt": (
        "SIGINT or SIGTERM at an operation on a file",
        "the stage saves and says so; the same command goes on",
    ),
    "container": (
        "dvc is killed below a process that adopts what it leaves, as a container's first does",
        "the stage ends too; the same command goes on",
    ),
    "full disk": (
        "from an operation on a file on there is no room",
        "the run fails and names the full disk; the same command goes on when there is room",
    ),
    "full file system": (
        "the data root is on a file system with less room than is needed",
        "as above",
    ),
    "flip": (
        "a bit of a file in the data root or in DVC's cache is turned between two runs",
        "the stage that made the file runs again, or DVC restores it",
    ),
    "gc": (
        "the store is compacted while a stage reads and writes it",
        "nothing",
    ),
    "beside": (
        "a second flow, or `dvc repro`, while a flow runs",
        "one of them waits, or says who holds the lock; the same command goes on",
    ),
    "bucket": (
        "the store is in a bucket behind a network that cuts, delays, refuses or answers 503",
        "the stage tries again, or fails and says so; the same command goes on",
    ),
}
SAMPLING = ("profile", "baseline", "evaluate")
LATE = ("train", "evaluate", "report")  # what a whole flow starts from: the others take long
NETWORKS = ("cut", "slow", "503", "refused")
OFTEN = {"code": 1, "ingest": 1, "policy": 2, "profile": 5, "train": 5}  # the others: 3 parts
VIAS = ("direct", "dvc", "flow")


@dataclass(frozen=True)
class Event:
    """One event: what is run, and what is done to it. `at` is a share: of the operations or the
    seconds that the command takes undisturbed."""

    number: int
    seed: int
    kind: str
    stage: str
    via: str  # how the stage is started
    forked: bool  # from a process that has imported its libraries, as under a flow
    level: str  # which process is hit
    at: float
    record: bool  # whether operations on MLflow's record count
    how: str  # what more the kind needs

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def command(self, world: World) -> list[str]:
        """What is run, and run again."""
        if self.via == "flow":
            return FLOW
        if self.kind == "flip":
            return ["dvc", "repro", STAGES[world.stages[-1]]]
        return repro(self.stage) if self.via == "dvc" else direct(self.stage, world.project)

    @property
    def rng(self) -> random.Random:
        """Chance within the event."""
        return random.Random(f"{self.seed}/{self.number}/within")


def draw(seed: int, number: int, kinds: list[str]) -> Event:
    """Event `number` of the run `seed`, of one of `kinds`."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    via = rng.choices(VIAS, [35, 50, 15])[0]
    if kind in ("container", "full file system", "flip"):
        via = "dvc" if rng.random() < 0.7 or kind == "container" else "flow"
    if kind in ("gc", "bucket"):
        via = "direct" if rng.random() < 0.5 else "dvc"
    if kind == "beside":
        via = "flow"
    names = LATE if via == "flow" else SAMPLING if kind in ("gc", "bucket") else tuple(STAGES)
    levels = {
        "direct": ("stage", "self", "worker", "all"),
        "dvc": ("dvc", "stage", "self", "worker", "all"),
        "flow": ("flow", "dvc", "stage", "self", "worker", "all"),
    }[via]
    level = rng.choice(levels)
    hows = {
        "interrupt": ("SIGINT", "SIGTERM"),
        "container": ("bwrap", "subreaper"),
        "bucket": NETWORKS,
        "beside": ("flow", "dvc"),
    }
    return Event(
        number=number,
        seed=seed,
        kind=kind,
        stage=rng.choices(names, [OFTEN.get(name, 3) for name in names])[0],
        via=via,
        forked=kind != "container" and rng.random() < 0.8,
        level={"container": "dvc", "interrupt": via.replace("direct", "stage")}.get(kind, level),
        at=rng.random(),
        record=rng.random() < 0.25,
        how=rng.choice(hows[kind]) if kind in hows else "",
    )
