"""The store with real stages: concurrent and killed ones, growth, and the command line."""

import argparse
import contextlib
import io
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

import tasks.evaluate.run
import tasks.profile.run
from tasks.common import params
from tasks.common.artifacts import PROFILE, PROMPTS, ROLLOUTS, Layout
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError
from tasks.common.stage import Stage
from tasks.common.tracking.journal import Tracker
from tasks.store.admin import commands
from tests.engines.conftest import placed
from tests.stages import Forked
from tests.store.test_rollouts import prompts_table
from tests.train.worlds import PARAMS


def make_root(
    root: Path, policy: Path, store: str | None, numbers: range, **changes: Any
) -> Layout:
    """Make a data root with prompts, the policy and parameters: batches of three prompts, and the
    given store."""
    layout = Layout(root)
    placed(policy, root)
    write_prompts(layout, numbers)
    settings = {
        "store": {"location": store, "batch_rollouts": 12, "logprobs": False},
        "profile": {"num_samples": 4},
    }
    (root / "params.yaml").write_text(yaml.safe_dump({**PARAMS, **settings, **changes}))
    return layout


def write_prompts(layout: Layout, numbers: range) -> None:
    for split in ("train", "test"):
        PROMPTS.write(layout.prompts(split), prompts_table(numbers))


def change(layout: Layout, section: str, **values: Any) -> None:
    path = layout.root / "params.yaml"
    before = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**before, section: {**before[section], **values}}))


def fork(layout: Layout) -> Forked:
    """Fork the command, which saves its imports."""
    return Forked("profile", layout.root / "params.yaml", layout.root)


def finish(process: Forked) -> str:
    """Return the log of a stage, which must succeed."""
    log = process.finish()
    assert process.returncode == 0, log
    return log


def stored_rows(location: Path) -> int:
    return sum(len(pl.read_parquet(path)) for path in location.glob("*/*/*.parquet"))


def tables(layout: Layout) -> tuple[pl.DataFrame, pl.DataFrame]:
    return PROFILE.read(layout.profile / "profile.parquet"), ROLLOUTS.read(
        layout.profile / "rollouts.parquet"
    )


def run(layout: Layout, stage: str, main: Callable[[Stage], None]) -> dict[str, str]:
    """Run a stage in this process. Return its message about reused rollouts by kind."""
    values = params.load(layout.root / "params.yaml")
    main(Stage(stage, values, layout, None, None, argparse.Namespace(), Tracker()))
    return {kind: note["said"] for kind, note in read_checked(layout.sampling_note(stage)).items()}


def profile(layout: Layout) -> str:
    return run(layout, "profile", tasks.profile.run.main)["sampled"]


def test_growth_through_the_stage(guesser: Path, tmp_path: Path) -> None:
    layout = make_root(tmp_path, guesser, None, range(10))
    assert profile(layout).startswith("0 rollouts reused, 40 sampled (")
    first, rollouts = tables(layout)
    assert profile(layout) == "40 rollouts reused, 0 sampled"
    assert tables(layout)[0].equals(first)
    write_prompts(layout, range(11))  # one more than before
    message = profile(layout)
    assert message.startswith("40 rollouts reused, 4 sampled (")
    assert message.endswith("tokens): 1 prompt new to the store")
    change(layout, "profile", num_samples=8)
    message = profile(layout)
    assert message.startswith("44 rollouts reused, 44 sampled (")
    assert message.endswith("tokens): num_samples 4 -> 8")
    is_old = (pl.col("sample_index") < 4) & (pl.col("prompt_id") != "p10")
    assert tables(layout)[1].filter(is_old).equals(rollouts)
    edited = pl.when(pl.col("prompt_id") == "p3")
    prompts = PROMPTS.read(layout.prompts("train"))
    prompts = prompts.with_columns(prompt=edited.then(pl.lit("30 + 3 =")).otherwise("prompt"))
    PROMPTS.write(layout.prompts("train"), prompts)
    assert profile(layout).startswith("80 rollouts reused, 8 sampled (")
    _, before = tables(layout)
    likely = before.filter(prompt_id="p3", outcome="wrong")["answer"][0]
    prompts = prompts.with_columns(answer=edited.then(pl.lit(likely)).otherwise("answer"))
    PROMPTS.write(layout.prompts("train"), prompts)
    assert profile(layout) == "88 rollouts reused, 0 sampled"
    _, after = tables(layout)
    assert after["text"].equals(before["text"])
    expected = before.filter(prompt_id="p3", answer=likely).height
    assert after.filter(prompt_id="p3")["reward"].sum() == expected > 0


@pytest.mark.slow
def test_two_processes_with_their_own_roots_share_the_work(qwen: Path, tmp_path: Path) -> None:
    """Both sample the same prompts at the same time. Their profiles are equal, and have each
    rollout once."""
    location = tmp_path / "shared"
    roots = [make_root(tmp_path / name, qwen, str(location), range(60)) for name in "ab"]
    logs = [finish(process) for process in [fork(layout) for layout in roots]]
    first, second = (tables(layout) for layout in roots)
    assert first[0].equals(second[0])
    assert first[1].equals(second[1])
    assert len(first[1]) == 240
    assert not first[1].select("prompt_id", "sample_index").is_duplicated().any()
    # batches (of 12) that both sample at the same time may be in the store twice, but not all
    sampled = sum(int(re.findall(r"reused, (\d+) sampled", log)[0]) for log in logs)
    assert sampled == stored_rows(location)
    assert 240 <= sampled < 480


@pytest.mark.slow
def test_two_processes_on_one_root_sample_each_rollout_once(qwen: Path, tmp_path: Path) -> None:
    layout = make_root(tmp_path, qwen, None, range(30))
    for process in [fork(layout), fork(layout)]:
        finish(process)
    assert stored_rows(layout.store) == 120


@pytest.mark.slow
def test_killed_stages_lose_no_rollouts(qwen: Path, tmp_path: Path) -> None:
    """After kills, also while others compact shards, the profile is that of an uninterrupted
    run."""
    alone, killed = (
        make_root(tmp_path / name, qwen, None, range(50)) for name in ("alone", "killed")
    )
    change(alone, "sampling", max_tokens=24)
    change(killed, "sampling", max_tokens=24)
    profile(alone)
    rng, progress = random.Random(0), [0]
    for _ in range(2):
        process = fork(killed)
        wait_for_shards(killed, process, progress[-1] + rng.randint(1, 5))
        process.kill()
        process.finish()
        progress.append(stored_rows(killed.store))
        admin("gc", killed)
        assert stored_rows(killed.store) == progress[-1]
    message = profile(killed)
    assert progress == sorted(set(progress))  # every attempt made progress
    assert message.startswith(f"{progress[-1]} rollouts reused, {200 - progress[-1]} sampled (")
    for one, other in zip(tables(alone), tables(killed), strict=True):
        assert one.equals(other)


def wait_for_shards(layout: Layout, process: Forked, rows: int) -> None:
    """Wait until the store contains more than `rows` rollouts."""
    while stored_rows(layout.store) <= rows:
        assert process.poll() is None, process.finish()
        time.sleep(0.002)


def admin(name: str, layout: Layout, *policies: str, dry_run: bool = False, status: int = 0) -> str:
    """Return what `winnow store` prints, run in this process."""
    printed, values = io.StringIO(), params.load(layout.root / "params.yaml")
    with contextlib.redirect_stdout(printed):
        found = commands.run(name, values, layout, policies=list(policies), dry_run=dry_run)
    assert found == status
    return printed.getvalue()


@pytest.mark.slow
def test_commands_of_the_store(qwen: Path, tmp_path: Path) -> None:
    layout = make_root(tmp_path, qwen, None, range(9))
    assert "empty" in admin("stat", layout)
    profile(layout)
    policy = next(layout.store.iterdir()).name
    stat = admin("stat", layout)
    assert f"policy    {policy}\nsampling  max_tokens 8, seed 0, temperature 1.0, " in stat
    assert "rollouts  36: 9 prompts, 4 to 4 samples" in stat
    assert "sampled   hf " in stat
    assert "no shard is damaged" in admin("verify", layout)
    shard = sorted(layout.store.glob("*/*/*.parquet"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"DAMAGED {shard}: its" in admin("verify", layout, status=1)
    profile(layout)
    assert "set aside earlier" in admin("verify", layout, status=1)
    dry = admin("gc", layout, dry_run=True)
    assert f"would remove {shard}.damaged (damaged)" in dry
    assert "would merge 3 shards" in dry
    assert len(list(layout.store.glob("*/*/*"))) == 5
    assert admin("gc", layout) == dry.replace("would ", "")
    assert len(list(layout.store.glob("*/*/*"))) == 2
    assert "nothing to do" in admin("gc", layout)
    assert profile(layout) == "36 rollouts reused, 0 sampled"
    with pytest.raises(ArtifactError, match="has no rollouts of policy nobody; choose from"):
        admin("gc", layout, "nobody")
    admin("gc", layout, policy, policy)
    assert "empty" in admin("stat", layout)
    (layout.root / "params.yaml").write_text("{profile: {}}\n")  # without a section `store`
    assert "empty" in admin("verify", layout)


def test_evaluation_reports_both_kinds_of_samples(qwen: Path, tmp_path: Path) -> None:
    layout = make_root(
        tmp_path,
        qwen,
        None,
        range(3),
        evaluate={"num_samples": 2, "pass_at": [1], "num_bootstrap": 9},
    )
    message = run(layout, "baseline", tasks.evaluate.run.main)
    assert message["sampled"].startswith("0 rollouts reused, 6 sampled (")
    assert message["greedy"].startswith("0 rollouts reused, 3 sampled (")
    change(layout, "evaluate", num_samples=3)
    message = run(layout, "baseline", tasks.evaluate.run.main)
    assert message["sampled"].endswith("tokens): num_samples 2 -> 3")
    assert message["greedy"] == "3 rollouts reused, 0 sampled"
