"""Publish a trained policy with its provenance to a hub, a bucket or a folder: weights and
tokenizer, a model card, the recipe's settings, the plan, the ledger, and its test result.

On a hub all files are one commit. Elsewhere the card is written last, so a destination without a
card is incomplete. Files of a former policy that libraries could load are removed. Otherwise, for
example, a library might load an old chat template when the new policy has none."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from httpx2 import HTTPError
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
)

from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, digest_file
from tasks.common.layout import Layout
from tasks.common.locations import open_location, reaching
from tasks.common.progress import progress
from tasks.models.folder import OBJECTS, trained_digest
from tasks.models.provenance import metrics_of, require_same, settings_of

HUB = "hf://"
CARD = "README.md"
CONFIG = "config.json"  # without it no library loads a policy
# the files of a policy that libraries load; all others belong to the owner of the destination
LOADED = (
    *(*OBJECTS, "model*.safetensors", "model.safetensors.index.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("additional_chat_templates/*.jinja", "adapter_config.json", "adapter_model.safetensors"),
)
ACCOUNTS = ("charged", "charged_mixed", "executed")
PARTS = ("generate", "score", "update")  # phases of training that count as the policy's cost
LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```"""


def push(layout: Layout, recipe: str, seed: int, destination: str, *, overwrite: bool) -> list[str]:
    """Write the policy of a recipe and seed to `hf://ORG/NAME`, `s3://bucket/prefix` or a folder,
    and return the names of the files. Raise ArtifactError for a cell that is unfinished or out of
    date and, unless `overwrite`, for a destination that has files (on a hub: a model's files)."""
    files = collect(layout, recipe, seed)
    check_origin(layout, recipe, seed)
    settings = settings_of(layout, recipe, seed)
    texts = {
        CARD: card(layout, recipe, seed, destination),
        "recipe.json": json.dumps(settings, indent=2) + "\n",
    }
    if destination.startswith(HUB):
        to_hub(destination.removeprefix(HUB), files, texts, f"{recipe}/{seed}", overwrite)
    else:
        for folder in (layout.policy, layout.recipe(recipe).parent):
            if Path(destination).expanduser().resolve().is_relative_to(folder.resolve()):
                raise ArtifactError(f"{folder} has the pipeline's own files: push to another place")
        to_location(destination, files, texts, overwrite)
    return sorted([*files, *texts])


def collect(layout: Layout, recipe: str, seed: int) -> dict[str, Path]:
    """Return a cell's files by their destination names. Raise ArtifactError if one is missing."""
    train, plan = layout.train(recipe, seed), layout.plan(recipe, seed)
    named = {
        "ledger.json": train / "flops.json",
        "curve.parquet": train / "curve.parquet",
        "plan.parquet": plan / "plan.parquet",
        "forecast.json": plan / "forecast.json",
        "metrics.json": layout.evaluation(recipe, seed) / "metrics.json",
    }
    trained = (train / "policy", layout.trained_card(recipe, seed))
    missing = [str(path) for path in (*trained, *named.values()) if not path.exists()]
    if missing:
        raise ArtifactError(f"{recipe}/{seed} has no {missing[0]}: create it with `winnow run`")
    own = [path for path in sorted(trained[0].rglob("*")) if path.is_file()]
    return {path.relative_to(trained[0]).as_posix(): path for path in own} | named


def check_origin(layout: Layout, recipe: str, seed: int) -> None:
    """Raise ArtifactError unless all files of a cell are of the trained weights: evaluation, plan,
    profile and initial policy. Otherwise the card would have the numbers of another policy."""
    trained = trained_digest(layout, recipe, seed)  # refuses damaged weights
    metrics_of(layout.trained_card(recipe, seed), layout.evaluation(recipe, seed))
    path = layout.train(recipe, seed) / "settings.json"
    made, plan = read_checked(path), layout.plan(recipe, seed)
    profiled = read_checked(plan / "forecast.json")["profile"]
    require_same(path, "policy", made["trained"], trained)
    require_same(path, "initial policy", made["policy"], read_checked(layout.policy_card)["digest"])
    require_same(path, "plan", made["plan"], digest_file(plan / "plan.parquet"))
    now = digest_file(layout.profile / "profile.parquet")
    require_same(plan / "forecast.json", "profile", profiled, now)


def card(layout: Layout, recipe: str, seed: int, destination: str) -> str:
    """Return the model card: the policy's origin, its results and cost, and how to load it."""
    metrics = read_checked(layout.evaluation(recipe, seed) / "metrics.json")
    policy = read_checked(layout.policy_card)
    source = policy["source"]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=policy.get("licence"),
        base_model=source.removeprefix(HUB).split("@")[0] if source.startswith(HUB) else None,
        tags=["rlvr", "winnow", recipe],
    )
    restored = policy.get("restored_from")
    origin = f"; restored from {restored}" if restored else ""
    totals = bill(layout, recipe, seed)
    costs = "\n".join(f"| {name} | {total:.4g} |" for name, total in totals.items())
    interval = f"{metrics['pass_at_1_low']:.1%} to {metrics['pass_at_1_high']:.1%}"
    is_on_hub = destination.startswith(HUB)
    place = destination.removeprefix(HUB) if is_on_hub else "PATH/OF/THIS/FOLDER"
    text = f"""---
{data.to_yaml()}
---

# {recipe}, seed {seed}

Trained by reinforcement learning with verifiable rewards, with the recipe `{recipe}` of
Winnow, from `{source}` (digest `{policy["digest"]}`{origin}).

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


def bill(layout: Layout, recipe: str, seed: int) -> dict[str, float]:
    """Return the FLOPs of a cell by account, as on the report's leaderboard."""
    ledger = read_checked(layout.train(recipe, seed) / "flops.json")
    totals = {name: sum(ledger[name][part] for part in PARTS) for name in ACCOUNTS}
    if read_checked(layout.plan(recipe, seed) / "forecast.json")["reads_profile"]:
        profile = read_checked(layout.profile / "flops.json")
        totals = {name: total + profile[name]["profile"] for name, total in totals.items()}
    return totals


def is_loaded(name: str) -> bool:
    """Return whether a library that loads a policy could read a file of this name."""
    return any(PurePosixPath("/", name).match(f"/{pattern}") for pattern in LOADED)


def to_hub(
    name: str, files: Mapping[str, Path], texts: Mapping[str, str], cell: str, overwrite: bool
) -> None:
    """Replace the policy on the hub in one commit. A missing repository is created as private."""
    hub = HfApi()
    try:
        there = hub.list_repo_files(name) if hub.repo_exists(name) else []
        if not overwrite and any(path == CARD or is_loaded(path) for path in there):
            raise ArtifactError(f"{HUB}{name} has a model: use another name, or --overwrite")
        hub.create_repo(name, private=True, exist_ok=True)
        content: dict[str, Any] = {**files, **{key: texts[key].encode() for key in texts}}
        stale = [path for path in there if is_loaded(path) and path not in content]
        operations: list[Any] = [
            CommitOperationAdd(path, content[path]) for path in sorted(content)
        ]
        operations += [CommitOperationDelete(path) for path in stale]
        hub.create_commit(name, operations, commit_message=f"Add the policy of {cell}")
    except (HTTPError, OSError, ValueError) as error:  # errors of the hub and of the connection
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise ArtifactError(f"{HUB}{name}: {message}") from error


def to_location(
    destination: str, files: Mapping[str, Path], texts: Mapping[str, str], overwrite: bool
) -> None:
    """Write a policy to a bucket or a folder. First remove the former one, beginning with its card
    and configuration; write the new ones last, so that no mix of the two policies can be loaded."""
    store, place = open_location(destination)
    with reaching(destination):
        if not overwrite and store.exists(place) and store.ls(place):
            raise ArtifactError(f"{destination} is not empty: use another place, or --overwrite")
        store.makedirs(place, exist_ok=True)
        there = [path.removeprefix(f"{place}/") for path in store.find(place, maxdepth=2)]
        former = [name for name in there if name == CARD or is_loaded(name)]
        for name in sorted(former, key=lambda name: (name != CARD, name != CONFIG)):
            store.rm_file(f"{place}/{name}")
        with progress(sum(path.stat().st_size for path in files.values()), "push", "B") as bar:
            for name in sorted(files, key=lambda name: name == CONFIG):
                path = f"{place}/{name}"
                store.makedirs(path.rpartition("/")[0], exist_ok=True)
                store.put_file(str(files[name]), path)
                bar.update(files[name].stat().st_size)
        for name in sorted(texts, key=lambda name: name == CARD):
            store.pipe_file(f"{place}/{name}", texts[name].encode())
