"""A recipe's plan as one table of visits, for other trainers: each visit is one prompt with its
group size, in the order of training."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from tasks.common import recipes
from tasks.common.artifacts import PLAN, PROFILE, PROMPTS
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, digest_file
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.models.policy import load_tokenizer, read_policy
from tasks.models.provenance import require_same
from tasks.train.needs import read_train
from tasks.train.settings import Entropy

TURN = pl.Struct({"role": pl.String, "content": pl.String})
OF_PROMPT = ("prompt_id", "prompt", "messages", "template", "answer", "verifier", "source", "level")
OF_PROFILE = ("prompt_id", "pass_rate", "pass_rate_low", "pass_rate_high")
STATIC = "plan"  # the control whose plan does not depend on outcomes
STATED = ("batch", "learning_rate", "validation")  # keys of `train` in the targets' settings


@dataclass(frozen=True)
class Visits:
    """The visits of a recipe and seed, or its prompts alone (`is_plan` false).

    `table` has a row per visit: visit, pass, phase, group_size, the columns of the prompt, with
    `messages` as a list of turns (null for plain text, which `prompt` is), and its pass rate with
    the interval. `digests` are of policy, prompts, profile and plan."""

    table: pl.DataFrame
    is_plan: bool
    digests: dict[str, str]
    not_carried: list[str]


def of_recipe(
    layout: Layout, values: dict[str, Any], recipe: str, seed: int, *, prompts_only: bool = False
) -> Visits:
    """Return the visits of a recipe and seed; with `prompts_only` the prompts that its strategy
    kept, each once, in groups of no stated size (0). Raise ParamsError if its control chooses
    prompts while it trains, and ArtifactError if the plan is missing or of another profile."""
    train = recipes.recipe(values, recipe)["train"]
    control = read_train(train).control["method"]
    if control != STATIC and not prompts_only:
        raise ParamsError(
            f"{recipe} has no plan to export: train.control {control} chooses prompts while it "
            "trains. Export another recipe, or its prompts and pass rates with --prompts-only"
        )
    folder = layout.plan(recipe, seed)
    plan = PLAN.read(folder / "plan.parquet").drop("order")
    noted = read_checked(folder / "forecast.json")["profile"]
    now = digest_file(layout.profile / "profile.parquet")
    require_same(folder / "forecast.json", "profile", noted, now)
    if prompts_only:
        plan = as_visits(plan.select("prompt_id").unique(maintain_order=True))
    table = joined(plan, prompts(layout), f"{recipe}/{seed}")
    digests = {
        "policy": read_checked(layout.policy_card)["digest"],
        "prompts": digest_file(layout.prompts("train")),
        "profile": now,
        "plan": digest_file(folder / "plan.parquet"),
    }
    older = stale(layout, digests["policy"])
    return Visits(table, not prompts_only, digests, [*older, *differences(train)])


def stale(layout: Layout, policy: str) -> list[str]:
    """Return a sentence if the profile is of another policy than `policy`, which changed since."""
    profiled = read_checked(layout.profile / "summary.json").get("policy", policy)
    return [
        f"the pass rates are of policy {profiled}, older than {policy}: `winnow run --until "
        "allocate` samples what the store lacks"
    ] * (profiled != policy)


def joined(plan: pl.DataFrame, prompts: pl.DataFrame, cell: str) -> pl.DataFrame:
    """Return the visits of a plan with the columns of their prompts. Raise ArtifactError if the
    plan visits another prompt."""
    table = plan.join(prompts, on="prompt_id", how="left", maintain_order="left")
    if missing := table.filter(pl.col("answer").is_null())["prompt_id"].head(1).to_list():
        raise ArtifactError(
            f"the plan of {cell} visits prompt {missing[0]}, which is not among the training "
            "prompts: bring it up to date with `winnow run`"
        )
    return table


def as_visits(prompts: pl.DataFrame, group_size: int = 0) -> pl.DataFrame:
    """Return a visit for each row of prompts; a group size of 0 is none."""
    same = {"pass": 0, "phase": 0, "group_size": group_size}
    return prompts.with_columns(
        pl.int_range(pl.len(), dtype=pl.Int64).alias("visit"),
        *(pl.lit(value, pl.Int32).alias(name) for name, value in same.items()),
    )


def prompts(layout: Layout, split: str = "train", *, has_rates: bool = True) -> pl.DataFrame:
    """Return the prompts of a split with their messages and pass rates (null if not profiled, and
    without `has_rates`)."""
    table = PROMPTS.read_columns(layout.prompts(split), OF_PROMPT)
    rates = PROFILE.frame([]).select(OF_PROFILE)
    if has_rates:
        rates = PROFILE.read_columns(layout.profile / "profile.parquet", OF_PROFILE)
    policy = read_policy(layout)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    has_template = tokenizer.chat_template is not None
    turns = [messages_of(row, has_template) for row in table.iter_rows(named=True)]
    table = table.with_columns(messages=pl.Series(turns, dtype=pl.List(TURN))).drop("template")
    return table.join(rates, on="prompt_id", how="left", maintain_order="left")


def messages_of(row: dict[str, Any], has_template: bool) -> list[dict[str, str]] | None:
    """Return a prompt's turns, as the policy's chat template receives them; None for plain text."""
    if row["messages"] is not None:
        return [
            {name: turn[name] for name in ("role", "content")}
            for turn in json.loads(row["messages"])
        ]
    if row["template"] is None and has_template:
        return [{"role": "user", "content": row["prompt"]}]
    return None


def differences(train: dict[str, Any]) -> list[str]:
    """Return what no target's settings state of a recipe's training: every value of `train` that is
    not the default, as `train.key: value`."""
    own, usual = (asdict(read_train(each)) for each in (train, {}))
    if own["loss"].get("entropy") == asdict(Entropy()):
        del own["loss"]["entropy"]  # it is off
    return [
        f"train.{key}: {own[key]}" for key in own if own[key] != usual[key] and key not in STATED
    ]
