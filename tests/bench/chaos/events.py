"""The content of an event, drawn from the seed and the event's number alone."""

import random
from dataclasses import dataclass

from tests.bench.chaos.world import FLOW, STAGES, World, direct, repro

KINDS = {  # relative frequencies; docs/guide/durability.md has the user's view
    "kill": 52,  # of one process or all, at an operation on a file, up to three times in a row
    "kill at a time": 14,  # imports included
    "interrupt": 4,  # SIGINT or SIGTERM
    "container": 6,  # dvc is killed below a process that adopts its orphans
    "full disk": 12,  # from some operation on a file
    "full file system": 4,  # of the data root: not enough room
    "flip": 5,  # of a bit in an output, or in DVC's cache
    "gc": 4,  # while a stage reads and writes the store
    "beside": 4,  # a second flow, or dvc, beside a flow
    "bucket": 5,  # over a network that cuts, delays, refuses or answers 503
    "short body": 4,  # a proxy cuts reads of a bucket at one place, twice or always
    "grader killed": 8,  # or their parent process, up to twice in a row
    "grader paused": 5,  # all, for longer than the time limit of an answer
    "machine paused": 6,  # all processes, for the same time
    "damaged lock": 6,  # dvc.lock is cut, has merge markers, or flipped bits
}
WHOLE = ("flip", "damaged lock")  # start in a finished world
SAMPLING = ("profile", "baseline", "evaluate")
GRADING = (*SAMPLING, "train")
LATE = ("train", "evaluate", "report")  # start of a whole flow: earlier stages take too long
HOWS = {
    "interrupt": ("SIGINT", "SIGTERM"),
    "container": ("bwrap", "subreaper"),
    "bucket": ("cut", "slow", "503", "refused"),
    "short body": ("twice", "always"),
    "beside": ("flow", "dvc"),
    "grader killed": ("grader", "grader", "starter"),
    "damaged lock": ("cut", "markers", "bits"),
}
OFTEN = {"code": 1, "ingest": 1, "policy": 2, "profile": 5, "train": 5}  # the others: 3 parts
VIAS = ("direct", "dvc", "flow")


@dataclass(frozen=True)
class Event:
    """One event: the command and its disturbance. `at` is a share: of the operations or the seconds
    of the undisturbed command."""

    number: int
    seed: int
    kind: str
    stage: str
    via: str  # the way the stage is started
    forked: bool  # from a process that has imported its libraries, as under a flow
    level: str  # the process to hit
    at: float
    record: bool  # count operations on MLflow's record
    how: str  # a further choice that the kind needs

    def command(self, world: World) -> list[str]:
        """Return the command to run, and to run again."""
        if self.via == "flow":
            return FLOW
        if self.kind in WHOLE:
            return ["dvc", "repro", STAGES[world.stages[-1]]]
        return repro(self.stage) if self.via == "dvc" else direct(self.stage, world.project)

    @property
    def rng(self) -> random.Random:
        """A random generator for choices within the event."""
        return random.Random(f"{self.seed}/{self.number}/within")


def draw(seed: int, number: int, kinds: list[str]) -> Event:
    """Return event `number` of the run `seed`, of one of `kinds`."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    via = rng.choices(VIAS, [35, 50, 15])[0]
    if kind in ("container", "full file system", "flip", "damaged lock"):
        via = "dvc" if rng.random() < 0.7 or kind == "container" else "flow"
    if kind in ("gc", "bucket", "short body", "grader killed", "grader paused"):
        via = "direct" if rng.random() < 0.5 else "dvc"
    if kind == "beside":
        via = "flow"
    names = LATE if via == "flow" else tuple(STAGES)
    if kind in ("gc", "bucket", "short body"):
        names = SAMPLING
    if kind in ("grader killed", "grader paused"):
        names = GRADING
    levels = {
        "direct": ("stage", "self", "worker", "all"),
        "dvc": ("dvc", "stage", "self", "worker", "all"),
        "flow": ("flow", "dvc", "stage", "self", "worker", "all"),
    }[via]
    level = rng.choice(levels)
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
        how=rng.choice(HOWS.get(kind, ("",))),
    )
