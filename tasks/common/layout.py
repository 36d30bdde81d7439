"""The paths of all files of the pipeline: stages exchange data only through these files."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """The paths under one data root. Data roots are independent of each other."""

    root: Path

    @property
    def code_folder(self) -> Path:
        return self.root / "code"

    def code(self, stage: str, recipe: str | None = None) -> Path:
        """Return the path of the code digests of a stage, or of a stage of one recipe."""
        return self.code_folder / (recipe or "") / f"{stage}.json"

    @property
    def code_params(self) -> Path:
        """Return the path of the copy of params.yaml that the stage `code` makes."""
        return self.code_folder / "params.yaml"

    @property
    def code_note(self) -> Path:
        """Return the path of a note with the digests of all files of the code. It only saves time,
        and is not an output of the stage `code`."""
        return self.locks / "code.json"

    def prompts(self, split: str) -> Path:
        return self.root / "prompts" / f"{split}.parquet"

    @property
    def policy(self) -> Path:
        return self.root / "policy"

    @property
    def policy_card(self) -> Path:
        return self.root / "policy.json"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def baseline(self) -> Path:
        return self.root / "baseline"

    def recipe(self, recipe: str) -> Path:
        return self.root / "runs" / recipe

    def plan(self, recipe: str, seed: int) -> Path:
        return self.recipe(recipe) / str(seed) / "plan"

    def train(self, recipe: str, seed: int) -> Path:
        return self.recipe(recipe) / str(seed) / "train"

    def trained_card(self, recipe: str, seed: int) -> Path:
        """Return the path of the file with the digest of the trained policy."""
        return self.train(recipe, seed) / "policy.json"

    def evaluation(self, recipe: str, seed: int) -> Path:
        return self.recipe(recipe) / str(seed) / "eval"

    def external(self, name: str) -> Path:
        """Return the folder of imported rollouts."""
        return self.root / "external" / name

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def store(self) -> Path:
        return self.root / "store"

    def sampling_note(self, cell: str) -> Path:
        """Return the file with a cell's last requests to the store, their counts and reasons. It
        is for users, and not an output of the stage."""
        return self.root / "draws" / f"{cell}.json"

    def measured(self, cell: str) -> Path:
        """Return the file with a cell's times and the work that it lost when killed; both differ
        between identical runs. `cell` is for example `profile` or `grpo-0`."""
        return self.root / "measured" / f"{cell}.json"

    def engine_logs(self, cell: str) -> Path:
        """Return the folder for the logs of the servers that a stage starts."""
        return self.root / "logs" / cell

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def unfinished_policy(self) -> Path:
        """Return the path of the checkpoint of the tiny policy's pretraining."""
        return self.checkpoints / "policy.safetensors"

    def unrecorded(self, recipe: str, seed: int) -> Path:
        """Return the folder for a training run's results until DVC has recorded them."""
        return self.checkpoints / "finished" / recipe / str(seed)

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def judged(self) -> Path:
        """Return the path of the database of verdicts by language models."""
        return self.root / "judged.sqlite"

    @property
    def tracking(self) -> Path:
        return self.root / "tracking"

    def written_by(self, stage: str, recipe: str | None, seed: int | None) -> list[Path]:
        """Return the folders that a stage writes, in the order of their use."""
        cell = (recipe or "", seed or 0)
        sampled = [self.store, self.locks]
        return {
            "ingest": [self.root / "prompts"],
            "policy": [self.checkpoints, self.policy],
            "profile": [*sampled, self.profile],
            "baseline": [*sampled, self.baseline],
            "allocate": [self.plan(*cell)],
            "train": [self.locks, self.checkpoints, self.train(*cell)],
            "evaluate": [*sampled, self.evaluation(*cell)],
            "report": [self.report],
        }.get(stage, [])
