"""What happens in an event, drawn from the seed and the event's number alone."""

import random
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.chaos.world import FLOW, STAGES, World, direct, repro
from tests.flows.project import ROOT

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
    "short body": 4,
    "grader killed": 8,
    "grader paused": 5,
    "machine paused": 6,
    "hostile request": 4,
    "damaged lock": 6,
    "hung server": 4,
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
    "short body": (
        "a proxy cuts the bodies of a bucket's rollouts at one place, twice each or always",
        "the stage tries again, or fails and says so; nothing is set aside for the team",
    ),
    "grader killed": (
        "SIGKILL of a grader, or of the process that starts them, up to twice in a row",
        "nothing",
    ),
    "grader paused": (
        "SIGSTOP of all graders for longer than an answer may take, and SIGCONT",
        "nothing",
    ),
    "machine paused": (
        "the same for all processes of the command, at an operation on a file",
        "nothing",
    ),
    "hostile request": (
        "requests of foreign pages to a Prefect server, and a run that sets what it may not",
        "they are refused, and the run fails by the name of the key",
    ),
    "damaged lock": (
        "dvc.lock is cut, has the markers of a merge, or turned bits",
        "the run names the command that repairs it, or makes what the file lacks",
    ),
    "hung server": (
        "of 64 stub servers one hangs while it answers",
        "its rows move to the others",
    ),
}
WHOLE = ("flip", "damaged lock", "hung server")  # begin in a finished world
SAMPLING = ("profile", "baseline", "evaluate")
GRADING = (*SAMPLING, "train")
LATE = ("train", "evaluate", "report")  # what a whole flow starts from: the others take long
HOWS = {
    "interrupt": ("SIGINT", "SIGTERM"),
    "container": ("bwrap", "subreaper"),
    "bucket": ("cut", "slow", "503", "refused"),
    "short body": ("twice", "always"),
    "beside": ("flow", "dvc"),
    "grader killed": ("grader", "grader", "starter"),
    "hostile request": ("page", "page", "run"),
    "damaged lock": ("cut", "markers", "bits"),
}
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
        if self.kind == "hung server":
            names = [str(self.seed), str(self.number)]
            module = ["python", "-m", "tests.bench.chaos.crowd"]
            return ["env", f"PYTHONPATH={ROOT}", *module, *names]
        if self.via == "flow":
            return FLOW
        if self.kind in WHOLE:
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
    if kind in ("container", "full file system", "flip", "damaged lock"):
        via = "dvc" if rng.random() < 0.7 or kind == "container" else "flow"
    if kind in ("gc", "bucket", "short body", "grader killed", "grader paused"):
        via = "direct" if rng.random() < 0.5 else "dvc"
    if kind in ("beside", "hostile request"):
        via = "flow"
    if kind == "hung server":
        via = "direct"
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
