"""Drawing through the store: nothing is sampled twice, nothing is mixed up, costs are of the rows
used."""

import dataclasses
import json
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from tasks.common.artifacts import PROMPTS, Layout
from tasks.common.files import ArtifactError
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.grading.graded import graded_rollouts
from tasks.grading.grader import Answer, Grader
from tasks.grading.settings import Verify
from tasks.models.policy import Policy, load_model, read_policy
from tasks.store.compaction import AUTOMATIC_FROM
from tasks.store.fixed_policy import SamplerSettings, StoredRollouts, sampling_cost
from tasks.store.settings import StoreSettings
from tests.full import largest_file
from tests.policies import ENGINE, place_policy

SETTINGS = SamplerSettings(
    Sampling(1.0, 1.0, 0, 8, 0),
    ENGINE,
    StoreSettings(None, 2048, False),
)
VERIFY = Verify(1, 5.0, 4.0, 0.5, {})


def draw(*arguments: Any, verify: Verify = VERIFY, greedy: bool, **options: Any) -> Any:
    """The graded rollouts, their costs, and the usage."""
    stored = StoredRollouts(*arguments, greedy=greedy, **options)
    with graded_rollouts(stored, verify, arguments[4].profile, greedy=greedy) as graded:
        return pl.concat(graded.parts()), stored.costs(), stored.usage


def prompts_table(numbers: range, answer: str = "7") -> pl.DataFrame:
    rows = [
        {
            "prompt_id": f"p{n}",
            "prompt": f"{n} + 3 =",
            "answer": answer,
            "verifier": "numeric",
            "source": "t",
            "level": "",
        }
        for n in numbers
    ]
    return PROMPTS.frame(rows)


@pytest.fixture
def world(qwen: Path, tmp_path: Path) -> tuple[Policy, Layout]:
    layout = Layout(tmp_path)
    place_policy(qwen, layout, load_model(qwen, dtype=torch.float32, device=torch.device("cpu")))
    return read_policy(layout), layout


def test_growth_samples_only_what_is_new(world: tuple[Policy, Layout]) -> None:
    policy, layout = world
    first, _, usage = draw(
        prompts_table(range(10)), policy, 4, SETTINGS, layout, cell="profile", greedy=False
    )
    assert (usage.sampled_rollouts, usage.reused_rollouts) == (40, 0)
    again, _, usage = draw(
        prompts_table(range(10)), policy, 4, SETTINGS, layout, cell="profile", greedy=False
    )
    assert (usage.sampled_rollouts, usage.sampled_tokens, usage.reused_rollouts) == (0, 0, 40)
    assert again.equals(first)
    more, _, usage = draw(
        prompts_table(range(11)), policy, 6, SETTINGS, layout, cell="profile", greedy=False
    )
    assert (usage.sampled_rollouts, usage.reused_rollouts) == (10 * 2 + 6, 40)
    assert more.filter((pl.col("sample_index") < 4) & (pl.col("prompt_id") != "p10")).equals(first)


def test_an_edited_answer_is_graded_again_and_not_sampled(world: tuple[Policy, Layout]) -> None:
    policy, layout = world
    prompts = prompts_table(range(8)).with_columns(verifier=pl.lit("exact"))
    first, _, _ = draw(prompts, policy, 8, SETTINGS, layout, cell="profile", greedy=False)
    finished = first.filter(outcome="wrong")["text"].str.strip_chars().to_list()
    likely, number = Counter(finished).most_common(1)[0]
    edited, _, usage = draw(
        prompts.with_columns(answer=pl.lit(likely)),
        *(policy, 8, SETTINGS, layout),
        cell="profile",
        greedy=False,
    )
    assert usage.sampled_rollouts == 0
    assert edited["text"].equals(first["text"])
    assert (edited["reward"].sum(), first["reward"].sum()) == (number, 0.0)


def test_a_new_version_of_a_verifier_grades_again_and_samples_nothing(
    world: tuple[Policy, Layout],
) -> None:
    policy, layout = world
    prompts = prompts_table(range(8)).with_columns(verifier=pl.lit("mine"))
    versions, outcomes, texts = [], [], []
    for tag in ("a", "b"):
        verify = dataclasses.replace(VERIFY, verifiers={"mine": format_of(tag)})
        graded, _, usage = draw(
            prompts, policy, 4, SETTINGS, layout, cell="profile", greedy=False, verify=verify
        )
        with Grader(verify) as grader:
            versions.append(grader.versions({"mine"})["mine"])
            outcomes.append(
                [
                    v.outcome
                    for v in grader.grade(
                        [Answer("mine", f"<{t}>x</{t}>", "7", False) for t in "ab"]
                    )
                ]
            )
        texts.append(graded["text"])
    assert usage.sampled_rollouts == 0
    assert usage.reused_rollouts == 32
    assert texts[0].equals(texts[1])
    assert versions[0] != versions[1]
    assert [row[0] == "correct" for row in outcomes] == [True, False]
    assert [row[1] == "correct" for row in outcomes] == [False, True]


def format_of(tag: str) -> dict[str, object]:
    return {"method": "format", "tags": [tag], "text_after": False}


def test_options_of_vllm_that_change_samples_have_their_own(world: tuple[Policy, Layout]) -> None:
    policy, layout = world
    found = []
    for vllm in ({}, {"max_num_batched_tokens": 2048}, {"quantization": "fp8"}):
        engine = dataclasses.replace(ENGINE, name="server", vllm=vllm)
        settings = dataclasses.replace(SETTINGS, engine=engine)
        asked = prompts_table(range(2)), policy, 1, settings, layout
        stored = StoredRollouts(*asked, cell="profile", greedy=False)
        found.append((stored.view.store.folder, stored.asked["sampling"]))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[2][1] == {**found[0][1], "vllm": {"quantization": "fp8"}}


def test_the_metrics_of_an_engine_are_recorded_with_the_usage(
    world: tuple[Policy, Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, layout = world
    monkeypatch.setattr(HfEngine, "metrics", lambda _: {"engine/num_preemptions": 2.0})
    asked = prompts_table(range(2)), policy, 1, SETTINGS, layout
    for expected in ({"engine/num_preemptions": 2.0}, {}):  # the second time nothing is sampled
        usage = draw(*asked, cell="profile", greedy=False)[2]
        found = usage.metrics()
        assert {name: found[name] for name in found if name.startswith("engine/")} == expected


def test_another_policy_or_sampling_is_never_mixed_in(
    world: tuple[Policy, Layout], llama: Path
) -> None:
    policy, layout = world
    draw(prompts_table(range(4)), policy, 2, SETTINGS, layout, cell="profile", greedy=False)
    other = dataclasses.replace(policy, digest="another")
    _, _, usage = draw(
        prompts_table(range(4)), other, 2, SETTINGS, layout, cell="profile", greedy=False
    )
    assert usage.sampled_rollouts == 8
    for change in ({"temperature": 0.5}, {"max_tokens": 9}, {"seed": 1}, {"top_k": 5}):
        changed = dataclasses.replace(
            SETTINGS, sampling=dataclasses.replace(SETTINGS.sampling, **change)
        )  # type: ignore[arg-type]
        _, _, usage = draw(
            prompts_table(range(4)), policy, 2, changed, layout, cell="profile", greedy=False
        )
        assert usage.sampled_rollouts == 8, change
    _, _, usage = draw(
        prompts_table(range(4)), policy, 1, SETTINGS, layout, cell="profile", greedy=True
    )
    assert usage.sampled_rollouts == 4


def test_costs_are_of_the_rows_used_from_any_run(
    world: tuple[Policy, Layout],
) -> None:
    policy, layout = world
    _, rows, _ = draw(
        prompts_table(range(6)), policy, 4, SETTINGS, layout, cell="profile", greedy=False
    )
    cold = sampling_cost(rows, policy, "profile", charged=True)
    _, rows, usage = draw(
        prompts_table(range(6)), policy, 4, SETTINGS, layout, cell="profile", greedy=False
    )
    assert usage.sampled_rollouts == 0
    warm = sampling_cost(rows, policy, "profile", charged=True)
    assert json.dumps(cold.as_dict()) == json.dumps(warm.as_dict())
    tokens = int(rows["prompt_tokens"].sum()) + int(rows["completion_tokens"].sum())
    assert warm.charged["profile"] == 2.0 * policy.architecture.num_matmul_parameters * tokens


SMALL = dataclasses.replace(SETTINGS, store=StoreSettings(None, 8, True))


def shard_files(layout: Layout) -> list[Path]:
    return sorted(layout.store.glob("*/*/*.parquet"))


def test_a_kill_between_batches_keeps_what_was_drawn(world: tuple[Policy, Layout]) -> None:
    policy, layout = world
    whole, _, _ = draw(
        prompts_table(range(6)), policy, 4, SMALL, layout, cell="profile", greedy=False
    )
    shards = shard_files(layout)
    assert len(shards) == 3
    shards[1].unlink()  # as if the run had been killed before this batch was kept
    again, _, usage = draw(
        prompts_table(range(6)), policy, 4, SMALL, layout, cell="profile", greedy=False
    )
    assert (usage.sampled_rollouts, usage.why) == (8, "2 prompts new to the store")
    assert again.equals(whole)


@pytest.mark.parametrize("how", ["cut", "bit", "keys", "empty"])
def test_a_damaged_shard_is_set_aside_and_its_rows_sampled_again(
    how: str, world: tuple[Policy, Layout], caplog: pytest.LogCaptureFixture
) -> None:
    policy, layout = world
    whole, _, _ = draw(
        prompts_table(range(6)), policy, 4, SMALL, layout, cell="profile", greedy=False
    )
    shard = shard_files(layout)[1]
    content = bytearray(shard.read_bytes())
    content[{"keys": 40}.get(how, len(content) // 2)] ^= (
        4  # one bit, which Parquet itself may not notice
    )
    shard.write_bytes({"cut": content[:-40], "empty": b""}.get(how, content))
    again, _, usage = draw(
        prompts_table(range(6)), policy, 4, SMALL, layout, cell="profile", greedy=False
    )
    assert usage.sampled_rollouts == 8
    assert "1 damaged shard set aside" in usage.why
    assert again.equals(whole)
    assert shard.name in caplog.text
    assert shard.with_name(shard.name + ".damaged").exists()
    _, _, usage = draw(
        prompts_table(range(6)), policy, 4, SMALL, layout, cell="profile", greedy=False
    )
    assert usage.sampled_rollouts == 0


def test_a_shard_that_is_damaged_while_others_are_read_is_sampled_again(
    world: tuple[Policy, Layout],
) -> None:
    policy, layout = world
    arguments = (prompts_table(range(6)), policy, 4, SMALL, layout)
    whole, costs, _ = draw(*arguments, cell="profile", greedy=False)
    stored = StoredRollouts(*arguments, cell="profile", greedy=False)
    sampled: list[pl.DataFrame] = []
    parts = stored.parts(sampled.append)
    read = [next(parts)]
    shard = shard_files(layout)[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    read += parts
    assert [len(part) for part in sampled] == [8]
    assert (stored.usage.sampled_rollouts, stored.usage.reused_rollouts) == (8, 16)
    rows = pl.concat(read).sort("row")
    assert rows["row"].to_list() == list(range(24))
    assert rows["text"].equals(whole["text"])
    assert stored.costs().drop("seconds").equals(costs.drop("seconds"))


def test_prompts_of_equal_text_share_samples_and_have_their_own_golds(
    world: tuple[Policy, Layout],
) -> None:
    policy, layout = world
    prompts = prompts_table(range(2)).with_columns(prompt=pl.lit("1 + 3 ="))
    first, _, _ = draw(prompts[:1], policy, 40, SETTINGS, layout, cell="profile", greedy=False)
    ended = first.filter(finish_reason="stop")["sample_index"][0]
    golds = pl.Series("answer", [first["text"][ended], "no such text"])
    prompts = prompts.with_columns(golds, verifier=pl.lit("exact"))
    both, costs, usage = draw(prompts, policy, 40, SETTINGS, layout, cell="profile", greedy=False)
    assert (usage.sampled_rollouts, usage.reused_rollouts, len(costs)) == (0, 40, 80)
    assert both["prompt_id"].to_list() == ["p0"] * 40 + ["p1"] * 40
    assert both["text"].to_list() == first["text"].to_list() * 2
    assert [both["outcome"][row] for row in (ended, ended + 40)] == ["correct", "wrong"]


def test_a_prompt_that_is_there_twice_is_refused(world: tuple[Policy, Layout]) -> None:
    policy, layout = world
    twice = pl.concat([prompts_table(range(2)), prompts_table(range(1))])
    with pytest.raises(ArtifactError, match="a prompt_id is duplicated"):
        draw(twice, policy, 2, SETTINGS, layout, cell="profile", greedy=False)


def test_logprobs_are_kept_where_they_are_wanted(world: tuple[Policy, Layout]) -> None:
    policy, layout = world
    draw(prompts_table(range(2)), policy, 2, SETTINGS, layout, cell="profile", greedy=False)
    draw(prompts_table(range(2, 4)), policy, 2, SMALL, layout, cell="profile", greedy=False)
    without, kept = [pl.read_parquet(path) for path in shard_files(layout)]
    assert without["logprobs"].null_count() == 4
    assert kept["logprobs"].list.len().to_list() == kept["token_ids"].list.len().to_list()
    assert (kept["logprobs"].list.max() <= 0.0).all()


def test_the_reason_is_said(world: tuple[Policy, Layout]) -> None:
    policy, layout = world

    def why(
        prompts: pl.DataFrame, num_samples: int = 2, policy: Policy = policy, **sampling: object
    ) -> str:
        changed = dataclasses.replace(SETTINGS.sampling, **sampling)  # type: ignore[arg-type]
        settings = dataclasses.replace(SETTINGS, sampling=changed)
        return draw(prompts, policy, num_samples, settings, layout, cell="profile", greedy=False)[
            2
        ].summary

    first = why(prompts_table(range(4)))
    assert first.startswith("0 rollouts reused, 8 sampled (")
    assert first.endswith(
        f"first time in this data root, nothing in the store for policy {policy.digest[:4]}.."
    )
    assert why(prompts_table(range(4))) == "8 rollouts reused, 0 sampled"
    assert why(prompts_table(range(6))).endswith("tokens): 2 prompts new to the store")
    assert why(prompts_table(range(6)), 4).endswith("tokens): num_samples 2 -> 4")
    other = dataclasses.replace(policy, digest="91c0aaaa")
    said = why(prompts_table(range(6)), 4, other)
    assert said.endswith(f"tokens): policy digest changed: {policy.digest[:4]}.. -> 91c0..")
    assert why(prompts_table(range(6)), 4, other, temperature=0.8).endswith(
        "tokens): sampling.temperature 1.0 -> 0.8"
    )
    note = json.loads(layout.sampling_note("profile").read_text())["sampled"]
    assert (note["asked"]["policy"], note["said"][:27]) == (
        "91c0aaaa",
        "0 rollouts reused, 24 sampl",
    )


def test_an_external_policy_that_changed_in_place_is_refused(
    world: tuple[Policy, Layout], qwen: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(qwen, folder)
    layout = Layout(tmp_path / "data")
    place_policy(
        folder, layout, load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    )
    read_policy(layout)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"abcd")
    with pytest.raises(ArtifactError, match="has changed since the stage `policy` read or made it"):
        read_policy(layout)


def test_a_prompt_too_long_is_named_before_anything_is_sampled(
    world: tuple[Policy, Layout],
) -> None:
    policy, layout = world
    prompts = prompts_table(range(3)).with_columns(
        prompt=pl.when(pl.col("prompt_id") == "p1").then(pl.lit("1" * 510)).otherwise("prompt")
    )
    with pytest.raises(ArtifactError, match="prompt p1 has 510 tokens"):
        draw(prompts, policy, 2, SETTINGS, layout, cell="profile", greedy=False)
    assert not layout.store.exists()


def test_samples_are_kept_where_their_shards_find_no_room_to_be_merged(
    world: tuple[Policy, Layout], caplog: pytest.LogCaptureFixture
) -> None:
    policy, layout = world
    settings = dataclasses.replace(SETTINGS, store=StoreSettings(None, 4, False))
    prompts, num_prompts = prompts_table(range(AUTOMATIC_FROM)), AUTOMATIC_FROM
    stored = StoredRollouts(prompts, policy, 4, settings, layout, cell="profile", greedy=False)
    with largest_file(1 << 21), ExitStack() as later:
        # the first shard has shown what a shard takes; from then on no file may be much larger
        def fill(rows: pl.DataFrame) -> None:
            largest = max(path.stat().st_size for path in layout.store.glob("*/*/*.parquet"))
            later.enter_context(largest_file(largest + largest // 4))

        found = pl.concat(stored.parts(fill))
    assert len(found) == 4 * num_prompts
    assert "the store keeps its small shards" in caplog.text
    assert len(list(layout.store.glob("*/*/*.parquet"))) == num_prompts
