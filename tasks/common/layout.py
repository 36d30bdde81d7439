"""Where every file of the pipeline stands, once: stages meet only in these places."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """Where everything stands under one data root. Another root is another, independent world."""

    root: Path

    @property
    def code_folder(self) -> Path:
        return self.root / "code"

    def code(self, stage: str, recipe: str | None = None) -> Path:
        """The digests of the code that a stage, or a stage of one recipe, can run."""
        return self.code_folder / (recipe or "") / f"{stage}.json"

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
        """The digest of the trained policy."""
        return self.train(recipe, seed) / "policy.json"

    def replayed(self, recipe: str, seed: int) -> Path:
        return self.root / "replayed" / recipe / str(seed)

    def evaluation(self, recipe: str, seed: int) -> Path:
        return self.recipe(recipe) / str(seed) / "eval"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def store(self) -> Path:
        return self.root / "store"

    def sampling_note(self, cell: str) -> Path:
        """The note of what a stage last asked of the store, what it sampled and why. It is for
        people, and not an output of the stage."""
        return self.root / "draws" / f"{cell}.json"

    def run_note(self, stage: str) -> Path:
        """The note of when and why the flow last ran or restored a stage. It is for people."""
        return self.root / "notes" / f"{stage}.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def unfinished_policy(self) -> Path:
        """What a policy that is being made here had learned when it was last saved."""
        return self.checkpoints / "policy.safetensors"

    def finished(self, recipe: str, seed: int) -> Path:
        """Where a training keeps its results until DVC has recorded them."""
        return self.checkpoints / "finished" / recipe / str(seed)

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def judged(self) -> Path:
        """The verdicts of language models that judge."""
        return self.root / "judged.sqlite"

    @property
    def tracking(self) -> Path:
        return self.root / "tracking"

    def written_by(self, stage: str, recipe: str | None, seed: int | None) -> list[Path]:
        """The folders that a stage cannot do without, in the order in which it needs them."""
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
