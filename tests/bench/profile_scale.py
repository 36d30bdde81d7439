"""A profile of a million rollouts: seconds, and the peak memory of the stage's process.

    python -m tests.bench.profile_scale [--rollouts 1000000] [--characters 2000]
    [--verifier numeric]

Fills a store with synthetic completions, as stages store them: batches of 2,048, prompts in random
order, then compaction. Then runs `python -m tasks.profile` on it, once on a hundredth of the
prompts and once on all. Nothing is sampled: reading, grading, sorting and writing are measured. The
store has no tokens, which the stage does not read. The claim is that memory does not grow with the
text, except for an index of a few dozen bytes per rollout."""

import argparse
import random
import tempfile
from pathlib import Path

import polars as pl
import torch
import yaml

from tasks.common import params
from tasks.common.artifacts import PROMPTS, STORE, Layout
from tasks.models.policy import load_model, read_policy
from tasks.store import compaction
from tasks.store.fixed_policy import SamplerSettings, StoredRollouts
from tasks.store.shards import KEYS
from tests.bench.peak import Peak, peak_of
from tests.bench.world import parameters
from tests.policies import make_policy, place_policy

NUM_SAMPLES = 16
BATCH = 2048
LETTERS = "".join(random.Random(0).choices("etaoin shrdlu", k=1 << 20))  # texts are cut from these


def make_root(root: Path, num_rollouts: int, num_characters: int, verifier: str) -> Layout:
    """Make a data root with a store that contains all rollouts of the profile."""
    layout = Layout(root)
    root.mkdir(parents=True, exist_ok=True)
    policy = make_policy(root / "made", "qwen3", max_length=num_characters)
    model = load_model(policy, dtype=torch.float32, device=torch.device("cpu"))
    place_policy(policy, layout, model)
    values = parameters(32)
    values["sampling"]["max_tokens"] = num_characters // 4
    values["profile"]["num_samples"] = NUM_SAMPLES
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    rows = [
        {**PROMPTS.example, "prompt_id": f"{n:016x}", "prompt": f"{n} + 3 =", "messages": None}
        for n in range(num_rollouts // NUM_SAMPLES)
    ]
    prompts = PROMPTS.frame(rows).with_columns(verifier=pl.lit(verifier))
    PROMPTS.write(layout.prompts("train"), prompts)
    fill(layout, prompts, num_characters)
    return layout


def fill(layout: Layout, prompts: pl.DataFrame, num_characters: int) -> None:
    """Store completions of `num_characters`. One in four ends in the answer."""
    settings = params.sections(params.load(layout.root / "params.yaml"), SamplerSettings)
    policy = read_policy(layout)
    stored = StoredRollouts(
        prompts, policy, NUM_SAMPLES, settings, layout, cell="bench", greedy=False
    )
    rng = random.Random(0)
    known = {name: value for name, value in STORE.example.items() if name not in ("text", *KEYS)}
    names = prompts["prompt_id"].sample(fraction=1.0, shuffle=True, seed=0)
    order = pl.DataFrame({"prompt_id": names}).join(
        stored.prompts, on="prompt_id", maintain_order="left"
    )
    keys = order.select("prompt_digest").join(
        stored.view.keys, on="prompt_digest", maintain_order="left_right"
    )
    for batch in keys.iter_slices(BATCH):
        starts = [rng.randrange(len(LETTERS) - num_characters) for _ in range(len(batch))]
        texts = [
            f"{LETTERS[start : start + num_characters - 4]} = {start % 4 + 5}" for start in starts
        ]
        rows = batch.with_columns(
            **{name: pl.lit(value) for name, value in known.items()}, text=pl.Series(texts)
        )
        stored.view.store.append(rows.cast(dict(STORE.columns)).select(list(STORE.columns)))  # type: ignore[arg-type]
    compaction.compact(stored.view.store, at_least=compaction.AUTOMATIC_FROM)


def measure(
    folder: Path | None, num_rollouts: int, num_characters: int, verifier: str
) -> tuple[Peak, float]:
    """Fill a store, run the stage in a separate process, and return its usage and the bytes
    stored."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        layout = make_root(Path(name), num_rollouts, num_characters, verifier)
        num_bytes = sum(path.stat().st_size for path in layout.store.rglob("*.parquet"))
        paths = ["--params", str(layout.root / "params.yaml"), "--data", str(layout.root)]
        return peak_of(["-m", "tasks.profile", *paths]), num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--characters", type=int, default=2000, help="of a completion")
    parser.add_argument("--verifier", choices=("numeric", "exact"), default="numeric")
    parser.add_argument("--folder", type=Path, help="for the files; a temporary folder otherwise")
    options = parser.parse_args()
    for count in (options.rollouts // 100, options.rollouts):
        spent, num_bytes = measure(options.folder, count, options.characters, options.verifier)
        print(
            f"{count:>10,} rollouts, {count * options.characters / 1e6:6,.0f} MB of text "
            f"({num_bytes / 1e6:,.0f} MB stored): {spent.seconds:6.0f} s, "
            f"{count / spent.seconds:6,.0f} rollouts/s, {spent.megabytes:6,.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
