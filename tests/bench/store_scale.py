"""A store of a million rollouts: time and memory to find the missing ones.

    python -m tests.bench.store_scale [--rollouts 1000000] [--tokens 100] [--location
    s3://bucket/prefix]

Fills a store (eight samples per prompt, batches of 2,048 as a stage appends them, random tokens and
text), then times three queries, each in a separate process: the missing rollouts of all prompts and
a tenth more; the rows of 1,000 prompts that one stage had appended; and, for comparison, a full
read of all rows, which the first query would need without the key columns. All of it before and
after compaction. Memory is the peak above an empty process with the imports."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.locations import open_location
from tasks.store import compaction
from tasks.store.folder import RolloutStore
from tasks.store.shards import KEYS
from tasks.store.view import StoreView
from tests.bench.clock import peak_megabytes
from tests.bench.peak import in_new_process

NUM_SAMPLES, BATCH = 8, 2048


def open_folder(location: str) -> RolloutStore:
    files, root = open_location(location)
    return RolloutStore(files, f"{root}/policy/sampling", {"policy": "policy", "sampling": {}})


def digests(first: int, last: int) -> pl.Series:
    """Return 16 hex digits per prompt, spread like hashes."""
    numbers = np.arange(first, last, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return pl.Series("prompt_digest", [f"{number:016x}" for number in numbers.tolist()])


def keys_of(first: int, last: int) -> pl.DataFrame:
    indices = pl.DataFrame({"sample_index": range(NUM_SAMPLES)}, schema={"sample_index": pl.Int32})
    return digests(first, last).to_frame().join(indices, how="cross")


def fill(store: RolloutStore, num_prompts: int, num_tokens: int) -> None:
    rng, step = np.random.default_rng(0), BATCH // NUM_SAMPLES
    for first in range(0, num_prompts, step):
        keys = keys_of(first, min(first + step, num_prompts))
        ids = rng.integers(0, 50_000, (len(keys), num_tokens), dtype=np.int32)
        letters = rng.integers(97, 113, (len(keys), 4 * num_tokens), dtype=np.uint8)
        columns = {
            **{name: pl.lit(value) for name, value in STORE.example.items() if name not in KEYS},
            "token_ids": pl.Series("token_ids", ids).arr.to_list(),
            "logprobs": pl.lit(None),
            "text": pl.Series("text", [row.tobytes().decode() for row in letters]),
            "completion_tokens": pl.lit(num_tokens),
        }
        store.append(
            STORE.check(keys.with_columns(**columns).cast(dict(STORE.columns)), "the benchmark")
        )  # type: ignore[arg-type]


# ------------------------------------------------------------- queries, each in its own process


def ask_nothing(store: RolloutStore, num_prompts: int) -> int:
    return 0


def ask_missing(store: RolloutStore, num_prompts: int) -> int:
    wanted = keys_of(0, num_prompts + num_prompts // 10)
    return len(StoreView(store, wanted).missing(wanted))


def ask_rows(store: RolloutStore, num_prompts: int) -> int:
    half = num_prompts // 2
    return len(
        StoreView(store, keys_of(half, half + 1000)).read(
            ["text", "finish_reason", "completion_tokens"]
        )
    )


def ask_whole(store: RolloutStore, num_prompts: int) -> int:
    wanted = keys_of(0, num_prompts + num_prompts // 10)
    found = [store.load(span, list(STORE.columns)) for span in store.spans()]
    return len(
        wanted.join(pl.concat([part for part in found if part is not None]), on=KEYS, how="anti")
    )


ASK: dict[str, Callable[[RolloutStore, int], int]] = {
    "nothing": ask_nothing,
    "missing": ask_missing,
    "rows of 1,000 prompts": ask_rows,
    "missing, from whole shards": ask_whole,
}


def answer(question: str, location: str, num_prompts: int) -> tuple[int, float, float]:
    """Return the rows that were found, the seconds, and the peak megabytes of this process."""
    started = time.perf_counter()
    rows = ASK[question](open_folder(location), num_prompts)
    return rows, time.perf_counter() - started, peak_megabytes()


def report(location: str, num_prompts: int, repeats: int) -> None:
    sizes = compaction.sizes(open_folder(location))
    print(f"\n{len(sizes)} shards, {sum(sizes.values()) / 1e6:,.0f} MB")
    _, _, empty = in_new_process(answer, "nothing", location, num_prompts)
    for question in list(ASK)[1:]:
        runs = [in_new_process(answer, question, location, num_prompts) for _ in range(repeats)]
        rows, seconds, memory = zip(*runs, strict=True)
        print(
            f"{question:28s} {rows[0]:>9,} rows  {statistics.median(seconds):6.2f} s  "
            f"{max(memory) - empty:6.0f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=100, help="of a completion")
    parser.add_argument(
        "--location", help="an empty folder or s3://bucket/prefix; a temporary folder otherwise"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of a query, for the median")
    options = parser.parse_args()
    num_prompts = options.rollouts // NUM_SAMPLES
    with tempfile.TemporaryDirectory() as folder:
        location = options.location or folder
        started = time.perf_counter()
        fill(open_folder(location), num_prompts, options.tokens)
        print(
            f"filled in {time.perf_counter() - started:.0f} s: {num_prompts:,} prompts, "
            f"{NUM_SAMPLES} samples each"
        )
        report(location, num_prompts, options.repeats)
        started = time.perf_counter()
        compaction.compact(open_folder(location))
        print(f"\ncompacted in {time.perf_counter() - started:.0f} s")
        report(location, num_prompts, options.repeats)


if __name__ == "__main__":
    main()
