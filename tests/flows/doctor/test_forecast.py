"""The forecast of a run's cost, with numbers by hand."""

import copy
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from flows.doctor import nvidia, rows
from flows.doctor.check import examine
from flows.doctor.forecast import Cost, fits, forecast, refusals
from flows.doctor.ranges import exactly
from flows.doctor.rates import CALL, MEASURED_FACTOR, STAGE_SECONDS, UPDATE, rates, table
from tasks.allocate import budget
from tasks.common import recipes
from tasks.common.accounting.ledger import Architecture
from tasks.common.accounting.spending import generation_cost, pass_cost, rows_in
from tasks.common.artifacts import PROFILE, PROMPTS, ROLLOUTS
from tasks.common.checksums import write_checked
from tasks.common.files import digest_file, write_text
from tasks.common.layout import Layout
from tasks.train import needs
from tests.allocate.test_allocate import profile_of
from tests.ingest.helpers import lines
from tests.parameters import PROJECT, every_value

P = 1000.0
POLICY = Architecture(1000, 0, 0, 0)
# executed forward passes of a token: groups of 8 rollouts read a prompt of 20 tokens once, and feed
# all but the last of 30 tokens in sampling
SAMPLED, READ = 20 + 8 * 29, 20 + 8 * 30
VALIDATED = 12 * (20 + 2 * 29)


@pytest.fixture
def values() -> dict[str, Any]:
    values = copy.deepcopy(every_value())
    values["sampling"]["max_tokens"] = 100
    values["experiment"]["budget"] = None
    values["ingest"]["splits"] = {"train": 10, "validation": 4, "test": 5}
    values["evaluate"]["num_samples"] = 3
    values["train"] |= {"validation": {"num_samples": 2, "every_share": 0.5}, "branches": []}
    return values


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path)
    write_checked(layout.policy_card, {"source": "tiny", **asdict(POLICY)})
    return layout


def write_profile(layout: Layout, seconds: float = 2.0) -> None:
    """Write a profile of one prompt of 20 tokens, solved twice by four samples of 30 tokens: 200
    tokens in so many seconds."""
    table = profile_of([(2, 4)]).with_columns(
        prompt_tokens=pl.lit(20, pl.Int32), completion_tokens=pl.lit(120, pl.Int64)
    )
    PROFILE.write(layout.profile / "profile.parquet", table.select(list(PROFILE.columns)))
    counts = {"charged": 2 * P * 200, "executed": 2 * P * 136, "tokens": 200.0, "rollouts": 4.0}
    flops = {name: {"profile": count} for name, count in counts.items()}
    write_checked(layout.profile / "flops.json", flops)
    of = digest_file(layout.profile / "profile.parquet")
    write_checked(layout.measured("profile"), {"of": of, "seconds": {"profile": seconds}})


def write_training(
    layout: Layout,
    seed: int,
    generate: float,
    update: float,
    size: float,
    sampled: float = 100 * P,
    updated: float = 300 * P,
    of: str = "",
) -> None:
    """Write the record of a run of one step of 32 rollouts of 50 tokens, with these seconds."""
    folder, num = layout.train("grpo", seed), {"generate": 32.0}
    write_text(folder / "curve.parquet", f"{seed}")
    of = of or digest_file(folder / "curve.parquet")
    executed = {"generate": sampled, "score": 0.0, "update": updated}
    charged, tokens = {"generate": 2 * size * 1600}, {"generate": 1600.0}
    flops = {"executed": executed, "charged": charged, "tokens": tokens, "rollouts": num}
    write_checked(folder / "flops.json", flops)
    seconds = {"generate": generate, "score": 0.0, "update": update}
    write_checked(layout.measured(f"grpo-{seed}"), {"of": of, "seconds": seconds})


def mixed(values: dict[str, Any], layout: Layout) -> float:
    """Return the expected share of mixed groups in the plan of grpo."""
    plan = budget.compared_plan(values, budget.read_profile(layout), "grpo")
    return budget.planned(plan, needs.read_train(recipes.recipe(values, "grpo")["train"])).mixed


def cost(values: dict[str, Any], layout: Layout, *stage: Any) -> Cost:
    [found], _ = forecast(values, layout, [(*stage, None, None)[:3]])
    assert found is not None
    return found


def test_an_evaluation_costs_its_samples_and_the_greedy_one(values, layout) -> None:
    """5 prompts, 3 + 1 samples, 20 + 30 tokens each; the initial policy's lengths are accurate to a
    tenth."""
    write_profile(layout)
    found = cost(values, layout, "baseline")
    assert found.tokens.middle == 5 * 4 * 50
    assert found.tokens.high == pytest.approx(5 * 4 * (20 + 33))
    assert found.flops.middle == 2 * P * 5 * 136
    seconds = 5 * 136 * 2 / 136  # at the profile's own rate
    assert found.hours.middle == pytest.approx((seconds + STAGE_SECONDS.middle) / 3600)
    assert found.gpu_hours == exactly(0)
    assert cost(values, layout, "evaluate", "grpo", 0).tokens.high == 5 * 4 * (20 + 66)


def test_training_follows_the_plan_of_the_profile(values, layout) -> None:
    """Four passes over one prompt in groups of 8, instead of the 10 prompts of the split.
    Validation: 4 prompts, 2 samples, 3 points, 50 tokens."""
    uniform = cost(values, layout, "train", "grpo", 0)
    write_profile(layout)
    found = cost(values, layout, "train", "grpo", 0)
    assert found.tokens.middle == 4 * 8 * 50 + 1200
    updated = 3 * mixed(values, layout) * READ
    assert found.flops.middle == pytest.approx(2 * P * (4 * (SAMPLED + updated) + VALIDATED))
    assert found.validation.middle == 2 * P * VALIDATED
    assert uniform.tokens.middle > 10 * found.tokens.middle - 10 * 1200
    values["train"]["max_steps"] = 1
    values["train"]["batch"] = {"unit": "prompts", "size": 2, "counts": "generated"}
    assert cost(values, layout, "train", "grpo", 0).tokens.middle == 2 * 8 * 50 + 1200
    values["train"]["batch"] = {"unit": "rollouts", "size": 4, "counts": "kept"}
    values["recipes"]["grpo"]["train"]["select"] = {"method": "pods", "keep": 2}
    assert cost(values, layout, "train", "grpo", 0).tokens.middle == 2 * 8 * 50 + 1200


def test_training_spends_the_budget_minus_the_profile(values, layout) -> None:
    """A rollout of 50 tokens costs 8 P per token. The profile of 10 prompts with 8 samples costs 2
    P 50 80. Validation is additional."""
    write_profile(layout)
    values["experiment"]["budget"] = {"account": "charged", "amount": 1e6 * P}
    grpo, sgpo = (cost(values, layout, "train", recipe, 0) for recipe in ("grpo", "sgpo"))
    assert grpo.tokens.middle == 1e6 / 8 + 1200
    groups, updated = 1e6 / 8 / 50 / 8, 3 * mixed(values, layout) * READ
    assert grpo.flops.middle == pytest.approx(2 * P * (groups * (SAMPLED + updated) + VALIDATED))
    assert sgpo.tokens.middle == (1e6 - 2 * 50 * 80) / 8 + 1200
    values["experiment"]["budget"] = {"account": "rollouts", "amount": 5000.0}
    assert cost(values, layout, "train", "grpo", 0).tokens.middle == 5000 * 50 + 1200


def test_the_expected_cost_of_a_budget_is_within_its_range(values, layout) -> None:
    """Short rollouts are cheaper, so there are more of them."""
    values["experiment"]["budget"] = {"account": "executed", "amount": 1e8 * P}
    for recipe in ("grpo", "winnow"):
        found = cost(values, layout, "train", recipe, 0)
        for numbers in (found.tokens, found.flops, found.hours):
            assert numbers.low <= numbers.middle <= numbers.high


@pytest.mark.parametrize(
    ("account", "change"),
    [
        ("charged_mixed", {"kl_coefficient": 0.1}),
        ("charged_mixed", {"loss": {"method": "regression"}}),
        ("charged", {"correction": {"m2po": 0.04}}),
        ("charged", {"correction": {"proximal": {}}, "max_staleness": 1}),
    ],
)
def test_a_reference_or_a_pass_before_the_update_reads_every_rollout(
    values, layout, account: str, change: dict[str, Any]
) -> None:
    """It adds a pass. With a reference, groups without a gradient are updated, too."""
    write_profile(layout)
    values["recipes"]["grpo"]["train"] |= change
    found = cost(values, layout, "train", "grpo", 0)
    passes = 1 + 3 * (mixed(values, layout) if "correction" in change else 1)
    expected = 2 * P * (4 * (SAMPLED + passes * READ) + VALIDATED)
    assert found.flops.middle == pytest.approx(expected)
    values["experiment"]["budget"] = {"account": account, "amount": 1e6 * P}
    assert cost(values, layout, "train", "grpo", 0).tokens.middle == 1e6 / 10 + 1200


def test_a_reference_reads_no_rollout_that_is_not_updated(values, layout) -> None:
    """It adds 2 P per token to the 6 P of the update."""
    write_profile(layout)
    train = values["recipes"]["grpo"]["train"]
    train["select"] = {"method": "mixed"}
    plain = cost(values, layout, "train", "grpo", 0).flops.middle
    train["kl_coefficient"] = 0.1
    added = cost(values, layout, "train", "grpo", 0).flops.middle - plain
    assert added == pytest.approx((plain - 2 * P * (4 * SAMPLED + VALIDATED)) / 3)


def test_stored_rollouts_that_can_join_are_read(values, layout) -> None:
    """For half of the groups of 8, 4 each: a quarter of a forward of every rollout."""
    write_profile(layout)
    replay = {"method": "successes", "per_prompt": 4, "capacity": 9}
    control = {"method": "experience", "share": 0.5}
    values["recipes"]["grpo"]["train"] |= {"replay": replay, "control": control}
    values["train"]["max_steps"] = 1
    values["train"]["batch"] = {"unit": "prompts", "size": 2, "counts": "generated"}
    found = cost(values, layout, "train", "grpo", 0)
    passes = 0.25 + 3 * mixed(values, layout)
    expected = 2 * P * (2 * (SAMPLED + passes * READ) + VALIDATED)
    assert found.flops.middle == pytest.approx(expected)
    values["experiment"]["budget"] = {"account": "charged", "amount": 1e6 * P}
    values["train"]["max_steps"] = None
    found = cost(values, layout, "train", "grpo", 0)
    assert found.tokens.middle == pytest.approx(1e6 / 8.5 + 1200)
    replay["per_prompt"] = 1
    assert cost(values, layout, "train", "grpo", 0).tokens.middle == 1e6 / 8 + 1200


def test_a_warm_start_counts_in_the_budget(values, layout) -> None:
    """Its 100 updates of 50 tokens with 6 P each count in the budget and in the recipe's FLOPs."""
    write_profile(layout)
    values["experiment"]["budget"] = {"account": "charged", "amount": 1e6 * P}
    warm_start = {"data": "profile", "steps": 25, "batch_size": 4, "learning_rate": None}
    values["recipes"]["grpo"]["train"]["warm_start"] = warm_start
    found = cost(values, layout, "train", "grpo", 0)
    profile, warm = 2 * 50 * 80, 6 * 50 * 100
    assert found.tokens.middle == (1e6 - profile - warm) / 8 + 1200
    groups, updated = (1e6 - profile - warm) / 8 / 50 / 8, 3 * mixed(values, layout) * READ
    expected = P * (2 * (groups * (SAMPLED + updated) + VALIDATED) + warm)
    assert found.flops.middle == pytest.approx(expected)
    values["experiment"]["budget"]["amount"] = 0.9 * (profile + warm) * P  # lengths may be lower
    [refused] = refusals(values, layout, ["grpo"])
    assert "the warm start of recipe 'grpo' takes about 2.82e+07" in refused  # of 47 tokens
    assert "lower profile.num_samples or train.warm_start.steps" in refused


@pytest.mark.parametrize("account", ["tokens", "charged_mixed", "executed"])
def test_the_rollouts_within_a_budget_cost_the_budget(values, layout, account: str) -> None:
    """The budget is spent on groups of 8, counted like rows of the run: mixed groups are
    updated."""
    write_profile(layout)
    amount = 1e10 if account != "tokens" else 1e5
    values["experiment"]["budget"] = {"account": account, "amount": amount}
    found = fits(values, layout, ["grpo"])["grpo"]
    group = [{**ROLLOUTS.example, "prompt_tokens": 20, "completion_tokens": 30}] * 8
    rows = rows_in(ROLLOUTS.frame(group))
    generated = generation_cost(account, POLICY, rows)
    whole = generated + 3 * pass_cost(account, POLICY, rows)
    num_groups = found["rollouts"].middle / 8
    assert num_groups * generated <= amount <= num_groups * whole
    assert (num_groups * whole == pytest.approx(amount)) == (account == "tokens")
    assert found["rollouts"].low < found["rollouts"].middle < found["rollouts"].high
    assert found["steps"].middle == found["rollouts"].middle / values["train"]["batch"]["size"]
    assert found["passes"].middle == pytest.approx(num_groups)  # over one prompt


def test_a_budget_below_the_cost_of_a_profile_is_refused(values, layout) -> None:
    """The profile has 10 prompts with 8 samples; once it exists, 1 with 4."""
    values["experiment"]["budget"] = {"account": "rollouts", "amount": 80.0}
    [found] = refusals(values, layout, ["grpo", "sgpo"])
    assert "the profile, which recipe 'sgpo' reads, takes at least 80 of it: raise" in found
    values["experiment"]["budget"]["amount"] = 81.0
    assert refusals(values, layout, ["sgpo"]) == []
    values["ingest"]["splits"]["train"] = 8
    assert fits(values, layout, ["sgpo"])["sgpo"]["rollouts"].middle == 81 - 64


def test_the_cost_of_an_existing_profile_is_exact(values, layout) -> None:
    write_profile(layout)
    values["ingest"]["splits"]["train"], values["profile"]["num_samples"] = 1, 4
    write_checked(layout.profile / "summary.json", {"settings": values["profile"]})
    sample = {**ROLLOUTS.example, "prompt_tokens": 20, "completion_tokens": 40}
    ROLLOUTS.write(layout.profile / "rollouts.parquet", ROLLOUTS.frame([sample] * 4))
    values["experiment"]["budget"] = {"account": "tokens", "amount": 240.0}
    assert "240 of it" in refusals(values, layout, ["sgpo"])[0]
    values["profile"]["num_samples"] = 3  # the profile will be another one
    assert refusals(values, layout, ["sgpo"]) == []


def test_a_profile_that_stops_costs_from_its_first_stage_on(values, layout) -> None:
    whole = cost(values, layout, "profile", None, None)
    values["profile"] = {**values["profile"], "stop": {"rule": "mixed"}}
    stopped = cost(values, layout, "profile", None, None)
    assert stopped.tokens.low == pytest.approx(whole.tokens.low / 4)  # 2 of 8 samples
    assert stopped.tokens.high == whole.tokens.high
    write_profile(layout)  # with 4 samples, but with other settings
    assert cost(values, layout, "profile", None, None).tokens.high > 4000
    write_checked(layout.profile / "summary.json", {"settings": values["profile"]})
    assert cost(values, layout, "profile", None, None).tokens.middle == pytest.approx(10 * 4 * 50)


def test_the_doctor_refuses_the_same_budgets_as_allocate(layout, tmp_path: Path) -> None:
    text = (PROJECT / "params.yaml").read_text()
    changed = re.sub("amount: [0-9.e]+", "amount: 1.0e+3", text)
    (tmp_path / "params.yaml").write_text(changed)
    found = examine(tmp_path / "params.yaml", layout)
    assert ["recipe 'sgpo' reads" in error for error in found.errors] == [True]


def test_there_is_no_cost_without_a_policy(values, tmp_path: Path) -> None:
    values["policy"]["source"] = "hf://org/name@0123"
    costs, why = forecast(values, Layout(tmp_path), [("profile", None, None)])
    assert costs == [None]
    assert "its size is unknown" in why


def test_existing_prompts_are_counted(values, layout) -> None:
    write_profile(layout)
    PROMPTS.write(layout.prompts("test"), PROMPTS.frame([]))
    assert cost(values, layout, "baseline").tokens == exactly(0)


def test_rates_come_from_runs_of_the_same_size(values, layout) -> None:
    """A run of ten times the size is excluded, and the seconds of a run that is not here now."""
    write_profile(layout)
    for seed, seconds, size in ((0, 1.0, P), (1, 4.0, P), (2, 1.0, 10 * P), (3, 9.0, P)):
        write_training(layout, seed, seconds, 2 * seconds, size, of="another" if seed == 3 else "")
    found = rates(values, layout, POLICY, 20.0, None, (0, 0))
    assert found.sampling.middle == 2 * P * 136 / 2.0
    assert found.rollouts.low == pytest.approx(100 * P / 4.0 / MEASURED_FACTOR)
    assert found.updates.high == pytest.approx(300 * P / 2.0 * MEASURED_FACTOR)
    assert found.source == "measured in 2 trainings here"


def test_recorded_work_is_forecast_with_the_recorded_seconds(values, layout) -> None:
    """A policy with layers, whose fixed time counts. After the profile of 2 s, the same work takes
    2 s again; sampling in training has the profile's speed, and updates still that of a matrix
    product. After a training of 6 s and 3 s, each part has its own speed."""
    policy = Architecture(1000, 0, 2, 0)
    write_checked(layout.policy_card, {"source": "tiny", **asdict(policy)})
    values["ingest"]["splits"] = {"train": 1, "validation": 0, "test": 1}
    values["profile"]["num_samples"], values["train"]["max_steps"] = 4, 1
    write_profile(layout)

    def seconds(*stage: Any) -> float:
        return 3600 * cost(values, layout, *stage).hours.middle - STAGE_SECONDS.middle

    assert seconds("profile") == pytest.approx(2)
    source = "sampling measured by the profile here; updates from a matrix product, 10 GFLOP/s here"
    assert forecast(values, layout, [])[1] == source
    sampled, updated = 2 * P * 4 * SAMPLED, 2 * P * 4 * 3 * mixed(values, layout) * READ
    # 4 samples at once need 64 forward passes at most of the longest completion of 90; so do 32
    longest = 90
    speed = (2 * P * 136 + longest * 2 * CALL) / 2
    first = (sampled + longest * 2 * CALL) / speed + (updated + 2 * UPDATE) / (0.9 * 1e10)
    assert seconds("train", "grpo", 0) == pytest.approx(first)
    write_training(layout, 0, 6.0, 3.0, P, sampled=sampled, updated=updated)
    assert seconds("train", "grpo", 0) == pytest.approx(9)
    assert seconds("profile") == pytest.approx(2)


def test_rates_are_assumed_without_measurements(values, layout) -> None:
    found = rates(values, layout, POLICY, 20.0, "NVIDIA H100 80GB HBM3", (1, 2))
    assert found.source.startswith("assumed for NVIDIA H100")
    assert (found.rollouts, found.updates) == table("an H100", 1, 2)[:2]
    peaks = [table(name, 1, num)[1].middle for name, num in (("an H100", 2), ("H100", 1), ("?", 1))]
    assert peaks == [2 * peaks[1], 989e12 / 4, 100e12 / 4]
    found = rates(values, layout, POLICY, 20.0, None, (0, 0))
    assert (found.sampling.middle, found.updates.middle) == (0.4 * 1e10, 0.9 * 1e10)
    assert found.source == "from a matrix product, 10 GFLOP/s here"


def test_gpu_hours_count_the_gpus_that_are_used(values, layout, monkeypatch) -> None:
    monkeypatch.setattr(nvidia, "gpus", lambda: [nvidia.Gpu("H100", 1e9, 1e9)] * 2)
    values["engine"]["num_processes"] = 2
    found = cost(values, layout, "train", "grpo", 0)
    assert found.gpu_hours.middle == 2 * found.hours.middle
    values["engine"]["device"] = "cpu"
    assert cost(values, layout, "train", "grpo", 0).gpu_hours == exactly(0)


def rows_file(path: Path, num: int) -> dict[str, Any]:
    """Write so many different questions of 40 characters, and return their source."""
    lines(path, *({"q": f"Is {n} a number?".ljust(40, "?"), "a": "1"} for n in range(num)))
    settings = {"path": str(path), "name": "mine", "level": None, "verifier": "exact"}
    return {"preset": "mapping", "settings": settings | {"prompt": "q", "answer": "a"}}


def test_rows_of_a_local_file_are_counted(values, tmp_path: Path) -> None:
    """Of 1,000 rows 700 are trained on: 8 samples of 40 characters and at most 100 tokens."""
    layout = Layout(tmp_path / "data")
    write_checked(layout.policy_card, {"source": "tiny", **asdict(POLICY)})
    values["ingest"]["sources"] = [rows_file(tmp_path / "rows.jsonl", 1000)]
    values["ingest"]["splits"] = {"train": None, "validation": 100, "test": 200}
    found = cost(values, layout, "profile")
    lengths = (40 / 6 + 15, 40 / 4 + 50, 40 + 100)
    assert [*found.tokens] == pytest.approx([5600 * length for length in lengths])
    for stage in (("profile",), ("train", "grpo", 0), ("train", "sgpo", 0), ("evaluate", "grpo")):
        found = cost(values, layout, *stage)
        for numbers in (found.tokens, found.flops, found.hours):
            assert 0 < numbers.low <= numbers.high <= 30 * numbers.low
    values["ingest"]["sources"].append(rows_file(tmp_path / "more.jsonl", 60) | {"split": "test"})
    values["ingest"]["splits"]["test"] = None
    assert cost(values, layout, "profile").tokens.high == 900 * 8 * 140
    assert cost(values, layout, "baseline").tokens.high == 60 * 4 * 140
    values["ingest"]["sources"] = [{"preset": "gsm8k", "settings": {"path": "s3://bucket/a"}}]
    values["ingest"]["splits"]["test"] = 5
    assert cost(values, layout, "profile").tokens.high == (1e6 - 105) * 8 * 500


def test_prompts_are_counted_in_tokens_of_a_local_policy(values, layout, tmp_path: Path) -> None:
    """Words are tokens. A chat template adds its own; a broken tokenizer is not used."""
    values["policy"]["source"] = str(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["one two", "one two three four"]
    assert rows.prompt_tokens(values, layout, texts) == exactly(3)
    (tmp_path / "chat_template.jinja").touch()
    assert rows.prompt_tokens(values, layout, texts) == exactly(3) + rows.TURN_TOKENS
    (tmp_path / "tokenizer.json").write_text("{}")
    assert rows.prompt_tokens(values, layout, texts).high == 12.5
    assert rows.prompt_tokens(values, layout, []) == rows.UNKNOWN_PROMPT


def test_a_profile_that_is_expected_to_exceed_the_budget_is_a_fault(
    values, layout, tmp_path: Path
) -> None:
    """8 samples of 10 prompts with 2 P a token, each about 60 (21 to 140) tokens long."""
    values["ingest"]["sources"] = [rows_file(tmp_path / "rows.jsonl", 20)]
    values["experiment"]["budget"] = {"account": "charged", "amount": 80 * 2 * P * 40}
    assert refusals(values, layout, ["sgpo"]) == []
    [found] = refusals(values, layout, ["grpo", "sgpo"], certain=False)
    assert "budget is 6.4e+06 of charged" in found
    assert f"recipe 'sgpo' reads, takes about {80 * 2 * P * 60:.3g} of it" in found
