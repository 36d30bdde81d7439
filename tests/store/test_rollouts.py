"""Rollouts through the store: no rollout is sampled twice, and costs are those of the used rows."""

import dataclasses
import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common.artifacts import PROMPTS, Layout
from tasks.common.files import ArtifactError
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.grading.graded import graded_rollouts
from tasks.grading.grader import Grader
from tasks.grading.settings import Verify
from tasks.models.policy import Policy, read_policy
from tasks.store.compaction import AUTOMATIC_FROM
from tasks.store.fixed_policy import SamplerSettings, StoredRollouts, sampling_cost
from tasks.store.settings import StoreSettings
from tests.engines.conftest import placed
from tests.full import largest_file
from tests.policies import ENGINE

SETTINGS = SamplerSettings(Sampling(1.0, 1.0, 0, 8, 0), ENGINE, StoreSettings(None, 2048, False))
VERIFY = Verify(1, 5.0, 4.0, 0.5, {})
World = tuple[Policy, Layout]


def stored_rollouts(
    world: World,
    prompts: pl.DataFrame,
    num_samples: int,
    settings: SamplerSettings = SETTINGS,
) -> StoredRollouts:
    """Return the rollouts that the stage `profile` requests."""
    return StoredRollouts(
        *(prompts, world[0], num_samples, settings, world[1]), cell="profile", greedy=False
    )


def draw(*arguments: Any, verify: Verify = VERIFY) -> Any:
    """Return the graded rollouts of `stored_rollouts`, their costs, and the usage."""
    stored = stored_rollouts(*arguments)
    with graded_rollouts(stored, verify, stored.layout.profile, greedy=False) as graded:
        return pl.concat(graded.parts()), stored.costs(), stored.usage


def prompts_table(numbers: range) -> pl.DataFrame:
    same = {"answer": "7", "verifier": "numeric", "source": "t", "level": ""}
    rows = [{"prompt_id": f"p{n}", "prompt": f"{n} + 3 =", **same} for n in numbers]
    return PROMPTS.frame(rows)


@pytest.fixture
def world(qwen: Path, tmp_path: Path) -> World:
    return placed(qwen, tmp_path), Layout(tmp_path)


def test_changed_verifier_grades_again_and_samples_nothing(world: World) -> None:
    prompts = prompts_table(range(8)).with_columns(verifier=pl.lit("mine"))
    versions, texts = [], []
    for tag in ("a", "b"):
        settings = {"mine": {"method": "format", "tags": [tag], "text_after": False}}
        verify = dataclasses.replace(VERIFY, verifiers=settings)
        graded, _, usage = draw(world, prompts, 4, verify=verify)
        texts.append(graded["text"])
        with Grader(verify) as grader:
            versions.append(grader.versions({"mine"})["mine"])
    assert (usage.sampled_rollouts, usage.reused_rollouts) == (0, 32)
    assert texts[0].equals(texts[1])
    assert versions[0] != versions[1]


def test_vllm_options_that_change_samples_have_their_own_folder(world: World) -> None:
    found = []
    for vllm in ({}, {"max_num_batched_tokens": 2048}, {"quantization": "fp8"}):
        engine = dataclasses.replace(ENGINE, name="server", vllm=vllm)
        settings = dataclasses.replace(SETTINGS, engine=engine)
        stored = stored_rollouts(world, prompts_table(range(2)), 1, settings)
        found.append((stored.view.store.folder, stored.request["sampling"]))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[2][1] == {**found[0][1], "vllm": {"quantization": "fp8"}}


def test_engine_metrics_are_recorded_with_the_usage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HfEngine, "metrics", lambda _: {"engine/num_preemptions": 2.0})
    for expected in ({"engine/num_preemptions": 2.0}, {}):  # the second run samples nothing
        found = draw(world, prompts_table(range(2)), 1)[2].metrics()
        assert {name: found[name] for name in found if name.startswith("engine/")} == expected


def test_costs_are_of_the_used_rows_of_any_run(world: World) -> None:
    policy, _ = world
    _, rows, _ = draw(world, prompts_table(range(6)), 4)
    cold = sampling_cost(rows, policy, "profile", charged=True)
    _, rows, usage = draw(world, prompts_table(range(6)), 4)
    assert usage.sampled_rollouts == 0
    warm = sampling_cost(rows, policy, "profile", charged=True)
    assert json.dumps(cold.as_dict()) == json.dumps(warm.as_dict())
    tokens = int(rows["prompt_tokens"].sum()) + int(rows["completion_tokens"].sum())
    assert warm.charged["profile"] == 2.0 * policy.architecture.num_matmul_parameters * tokens


SMALL = dataclasses.replace(SETTINGS, store=StoreSettings(None, 8, True))


def shard_files(layout: Layout) -> list[Path]:
    return sorted(layout.store.glob("*/*/*.parquet"))


@pytest.mark.parametrize("damage", ["cut", "bit", "keys"])
def test_damaged_shard_is_set_aside_and_its_rows_are_sampled_again(
    damage: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    request = (world, prompts_table(range(6)), 4, SMALL)
    whole, _, _ = draw(*request)
    shard = shard_files(world[1])[1]
    content = bytearray(shard.read_bytes())
    place = 40 if damage == "keys" else len(content) // 2
    content[place] ^= 4  # one bit, which Parquet may not detect
    shard.write_bytes(content[:-40] if damage == "cut" else content)
    again, _, usage = draw(*request)
    assert usage.sampled_rollouts == 8
    assert "1 damaged shard set aside" in usage.why
    assert again.equals(whole)
    assert shard.name in caplog.text
    assert shard.with_name(shard.name + ".damaged").exists()
    assert draw(*request)[2].sampled_rollouts == 0
    assert draw(world, prompts_table(range(7)), 4, SMALL)[2].why == "1 prompt new to the store"


def test_shard_damaged_during_reading_is_sampled_again(world: World) -> None:
    request = (world, prompts_table(range(6)), 4, SMALL)
    whole, costs, _ = draw(*request)
    stored = stored_rollouts(*request)
    sampled: list[pl.DataFrame] = []
    parts = stored.parts(sampled.append)
    read = [next(parts)]
    shard = shard_files(world[1])[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    read += parts
    assert [len(part) for part in sampled] == [8]
    assert (stored.usage.sampled_rollouts, stored.usage.reused_rollouts) == (8, 16)
    rows = pl.concat(read).sort("row")
    assert rows["row"].to_list() == list(range(24))
    assert rows["text"].equals(whole["text"])
    assert stored.costs().drop("seconds").equals(costs.drop("seconds"))


def test_prompts_of_equal_text_share_samples_and_have_their_own_golds(world: World) -> None:
    prompts = prompts_table(range(2)).with_columns(prompt=pl.lit("1 + 3 ="))
    first, _, _ = draw(world, prompts[:1], 40)
    ended = first.filter(finish_reason="stop")["sample_index"][0]
    golds = pl.Series("answer", [first["text"][ended], "no such text"])
    prompts = prompts.with_columns(golds, verifier=pl.lit("exact"))
    both, costs, usage = draw(world, prompts, 40)
    assert (usage.sampled_rollouts, usage.reused_rollouts, len(costs)) == (0, 40, 80)
    assert both["prompt_id"].to_list() == ["p0"] * 40 + ["p1"] * 40
    assert both["text"].to_list() == first["text"].to_list() * 2
    assert [both["outcome"][row] for row in (ended, ended + 40)] == ["correct", "wrong"]


def test_duplicate_prompt_is_refused(world: World) -> None:
    twice = pl.concat([prompts_table(range(2)), prompts_table(range(1))])
    with pytest.raises(ArtifactError, match="a prompt_id is duplicated"):
        draw(world, twice, 2)


def test_summary_contains_the_reason_why_no_rollout_is_reused(world: World) -> None:
    policy, layout = world

    def summary(world: World = world, **sampling: float) -> str:
        changed = dataclasses.replace(SETTINGS.sampling, **sampling)  # type: ignore[arg-type]
        settings = dataclasses.replace(SETTINGS, sampling=changed)
        found: str = draw(world, prompts_table(range(4)), 2, settings)[2].summary
        assert found.startswith("0 rollouts reused, 8 sampled (")
        return found

    assert summary().endswith(
        f"first time in this data root, nothing in the store for policy {policy.digest[:4]}.."
    )
    other = (dataclasses.replace(policy, digest="91c0aaaa"), layout)
    changed = f"policy digest changed: {policy.digest[:4]}.. -> 91c0.."
    assert summary(other).endswith(f"tokens): {changed}")
    assert summary(other, seed=1).endswith("tokens): sampling.seed 0 -> 1")
    last = summary(other, seed=1, temperature=0.8)
    assert last.endswith("tokens): sampling.temperature 1.0 -> 0.8")
    note = json.loads(layout.sampling_note("profile").read_text())["sampled"]
    assert (note["asked"]["policy"], note["said"]) == ("91c0aaaa", last)


def test_external_policy_that_changed_in_place_is_refused(qwen: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(qwen, folder)
    layout = Layout(tmp_path / "data")
    placed(folder, layout.root)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"abcd")
    with pytest.raises(ArtifactError, match="has changed since the stage `policy` read or made it"):
        read_policy(layout)


def test_samples_are_stored_although_the_disk_has_no_room_to_merge_shards(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dataclasses.replace(SETTINGS, store=StoreSettings(None, 4, False))
    stored = stored_rollouts(world, prompts_table(range(AUTOMATIC_FROM)), 4, settings)
    with largest_file(1 << 21), ExitStack() as later:
        # the first shard shows the size of a shard; no later file may be much larger
        def fill(rows: pl.DataFrame) -> None:
            largest = max(path.stat().st_size for path in shard_files(world[1]))
            later.enter_context(largest_file(largest + largest // 4))

        found = pl.concat(stored.parts(fill))
    assert len(found) == 4 * AUTOMATIC_FROM
    assert "the store keeps its small shards" in caplog.text
    assert len(shard_files(world[1])) == AUTOMATIC_FROM
