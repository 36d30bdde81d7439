"""Publishing a trained policy with its provenance to a hub, a bucket or a folder: weights and
tokenizer, a model card, the recipe's settings, the plan, the ledger, and its test result.

On a hub all files are one commit. Elsewhere the card is written last: a place without a card is
incomplete."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from httpx2 import HTTPError
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData

from tasks.common import params, recipes
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.locations import open_location, reaching
from tasks.common.progress import progress
from tasks.engines.settings import Sampling
from tasks.models.folder import trained_digest
from tasks.profile.settings import ProfileSettings

SECTIONS = {"sampling": Sampling, "profile": ProfileSettings}

HUB = "hf://"
CARD = "README.md"
ACCOUNTS = ("charged", "charged_mixed", "executed")
PARTS = ("generate", "score", "update")  # phases of training that count as the policy's cost
LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```"""


@dataclass(frozen=True)
class TrainedPolicy:
    """A trained policy, identified by recipe and seed."""

    recipe: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.seed}"


def push(
    layout: Layout,
    values: Mapping[str, Any],
    cell: TrainedPolicy,
    destination: str,
    *,
    overwrite: bool,
) -> list[str]:
    """Write the policy of a cell to `hf://ORG/NAME`, `s3://bucket/prefix` or a folder, and return
    the names of the files. Raise ArtifactError for an unfinished cell, and for a place that already
    has files unless they may be overwritten."""
    files = collect(layout, cell)
    texts = {
        CARD: card(layout, cell, destination),
        "recipe.json": json.dumps(settings(values, cell, layout), indent=2) + "\n",
    }
    if destination.startswith(HUB):
        to_hub(destination.removeprefix(HUB), files, texts, cell, overwrite)
    else:
        to_location(destination, files, texts, overwrite)
    return sorted([*files, *texts])


def collect(layout: Layout, cell: TrainedPolicy) -> dict[str, Path]:
    """Return the files of a cell, keyed by their names at the destination."""
    train, plan = layout.train(cell.recipe, cell.seed), layout.plan(cell.recipe, cell.seed)
    named = {
        "ledger.json": train / "flops.json",
        "curve.parquet": train / "curve.parquet",
        "plan.parquet": plan / "plan.parquet",
        "forecast.json": plan / "forecast.json",
        "metrics.json": layout.evaluation(cell.recipe, cell.seed) / "metrics.json",
    }
    trained = (train / "policy", layout.trained_card(cell.recipe, cell.seed))
    missing = [str(path) for path in (*trained, *named.values()) if not path.exists()]
    if missing:
        raise ArtifactError(f"{cell.name} has no {missing[0]}: run the pipeline first")
    trained_digest(layout, cell.recipe, cell.seed)  # refuses damaged weights
    weights = {path.name: path for path in sorted((train / "policy").iterdir()) if path.is_file()}
    return {**weights, **named}


def settings(values: Mapping[str, Any], cell: TrainedPolicy, layout: Layout) -> dict[str, Any]:
    """Return all settings with which the cell was allocated and trained."""
    chosen = recipes.of_cell(values, cell.recipe, layout.code_folder)
    allocate = {**values.get("allocate", {}), **chosen["allocate"]}
    return {
        "recipe": cell.recipe,
        "seed": cell.seed,
        **{name: asdict(params.section(values, name, cls)) for name, cls in SECTIONS.items()},
        "allocate": allocate,
        "train": chosen["train"],
    }


def card(layout: Layout, cell: TrainedPolicy, destination: str) -> str:
    """Return the model card: the policy's origin, its results and cost, and how to load it."""
    metrics = read_checked(layout.evaluation(cell.recipe, cell.seed) / "metrics.json")
    policy = read_checked(layout.policy_card)
    source = policy.get("location") or policy["source"]
    is_of_hub = policy["source"].startswith(HUB)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=policy["source"].removeprefix(HUB).split("@")[0] if is_of_hub else None,
        tags=["rlvr", "winnow", cell.recipe],
    )
    costs = "\n".join(f"| {name} | {total:.4g} |" for name, total in bill(layout, cell).items())
    interval = f"{metrics['pass_at_1_low']:.1%} to {metrics['pass_at_1_high']:.1%}"
    is_on_hub = destination.startswith(HUB)
    place = destination.removeprefix(HUB) if is_on_hub else "PATH/OF/THIS/FOLDER"
    text = f"""---
{data.to_yaml()}
---

# {cell.recipe}, seed {cell.seed}

Trained by reinforcement learning with verifiable rewards, with the recipe `{cell.recipe}` of
Winnow, from `{source}` (digest `{policy["digest"]}`).

On {metrics["num_prompts"]} test prompts, {metrics["num_samples"]} samples each: pass@1
{metrics["pass_at_1"]:.1%} (95 % interval {interval}), greedy {metrics["greedy"]:.1%}.

| account | FLOPs |
|---|---|
{costs}

As on the leaderboard: with the profile where the recipe reads it, without validation.

`recipe.json` has all settings, `plan.parquet` which prompts were visited with how many rollouts,
`ledger.json` the compute by phase and account, `curve.parquet` the validations, `metrics.json` the
test.

{LOADING.format(place=place)}
"""
    return str(ModelCard(text, ignore_metadata_errors=True))


def bill(layout: Layout, cell: TrainedPolicy) -> dict[str, float]:
    """Return the FLOPs of a cell by account, as on the report's leaderboard."""
    train = layout.train(cell.recipe, cell.seed)
    ledger = read_checked(train / "flops.json")
    totals = {name: sum(ledger[name][part] for part in PARTS) for name in ACCOUNTS}
    if read_checked(layout.plan(cell.recipe, cell.seed) / "forecast.json")["reads_profile"]:
        profile = read_checked(layout.profile / "flops.json")
        totals = {name: total + profile[name]["profile"] for name, total in totals.items()}
    return totals


def to_hub(
    name: str,
    files: Mapping[str, Path],
    texts: Mapping[str, str],
    cell: TrainedPolicy,
    overwrite: bool,
) -> None:
    """Create the repository (private) if it is missing, and write everything in one commit."""
    hub = HfApi()
    try:
        if hub.repo_exists(name) and hub.file_exists(name, CARD) and not overwrite:
            raise ArtifactError(f"{HUB}{name} has a model: use another name, or --overwrite")
        hub.create_repo(name, private=True, exist_ok=True)
        content: dict[str, Any] = {**files, **{key: texts[key].encode() for key in texts}}
        hub.create_commit(
            name,
            [CommitOperationAdd(path, content[path]) for path in sorted(content)],
            commit_message=f"Add the policy of {cell.name}",
        )
    except (HTTPError, OSError, ValueError) as error:  # errors of the hub and of the connection
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise ArtifactError(f"{HUB}{name}: {message}") from error


def to_location(
    destination: str, files: Mapping[str, Path], texts: Mapping[str, str], overwrite: bool
) -> None:
    """Write to a bucket or a folder, the card last."""
    store, place = open_location(destination)
    with reaching(destination):
        if not overwrite and store.exists(place) and store.ls(place):
            raise ArtifactError(f"{destination} is not empty: use another place, or --overwrite")
        store.makedirs(place, exist_ok=True)
        if store.exists(f"{place}/{CARD}"):  # the place is incomplete until all is replaced
            store.rm_file(f"{place}/{CARD}")
        with progress(sum(path.stat().st_size for path in files.values()), "push", "B") as bar:
            for name, path in files.items():
                store.put_file(str(path), f"{place}/{name}")
                bar.update(path.stat().st_size)
        for name in sorted(texts, key=lambda name: name == CARD):
            store.pipe_file(f"{place}/{name}", texts[name].encode())
