"""Results of other trainers: the evaluation of their checkpoints, and their place in the report.

A checkpoint is evaluated by the code of the stages `baseline` and `evaluate`, on the same test
prompts, with the same sampling parameters, seeds and stop tokens. Its rollouts are in the store, so
a second evaluation samples nothing."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.artifacts import PROMPTS
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError, digest_file
from tasks.common.layout import Layout
from tasks.common.stage import Stage
from tasks.evaluate.evaluation import run_evaluation
from tasks.evaluate.settings import Evaluate
from tasks.models.folder import policy_digest
from tasks.models.policy import Policy, load_tokenizer, open_policy, read_policy, stop_token_ids
from tasks.models.prompts import encode_prompts
from tasks.models.provenance import metrics_of
from tasks.policy.card import checked
from tasks.report.external import CHECKPOINTS, checkpoint_cells, write_external
from tasks.report.settings import ReportSettings
from tasks.store.fixed_policy import SamplerSettings
from tasks.store.usage import last_note
from tasks.train.learner.reference import check_vocabulary


def evaluate(layout: Layout, values: Mapping[str, Any], folder: Path, name: str) -> str:
    """Evaluate the policy in `folder` as `external/NAME`, and return the results in words. Raise
    ArtifactError for a policy that cannot be loaded or reads other prompts than the initial policy,
    and if the initial policy has not been evaluated with the present parameters."""
    initial = read_policy(layout)
    check_baseline(layout, values)
    described = checked(folder, initial.trust_remote_code)
    card = {**described, "trust_remote_code": initial.trust_remote_code}
    policy = open_policy(folder, policy_digest(folder), card)
    check_prompts(layout, values, initial, policy)
    out, note = layout.external(name) / "eval", layout.external(name) / "checkpoint.json"
    note.unlink(missing_ok=True)  # it would belong to other rollouts
    run_evaluation(Stage.unrecorded(f"external/{name}", dict(values), layout), policy, out)
    compared = {"baseline": digest_file(layout.baseline / "rollouts.parquet")}
    write_checked(note, {"location": str(folder), "digest": policy.digest, **compared})
    cells = checkpoint_cells(layout, name, report_settings(values).num_bootstrap)
    return "; ".join(f"{what} {cell}" for what, cell in zip(CHECKPOINTS, cells, strict=True))


def check_baseline(layout: Layout, values: Mapping[str, Any]) -> None:
    """Raise ArtifactError unless the initial policy was evaluated with the present parameters, as
    far as its evaluation and its note on sampling (absent after `dvc pull`) state them."""
    noted = metrics_of(layout.policy_card, layout.baseline)["settings"]
    sampler = params.sections(values, SamplerSettings)
    now = asdict(sampler.sampling) | sampler.engine.altering
    asked = last_note(layout, "baseline", "sampled") or {"sampling": now}
    if noted != asdict(params.section(values, "evaluate", Evaluate)) or asked["sampling"] != now:
        raise ArtifactError(
            "the initial policy was evaluated with other parameters than the present ones: bring "
            "`baseline` up to date with `winnow run`"
        )


def check_prompts(
    layout: Layout, values: Mapping[str, Any], initial: Policy, policy: Policy
) -> None:
    """Raise ArtifactError unless a policy has the initial policy's vocabulary and stop tokens, and
    reads the same tokens for every test prompt."""
    check_vocabulary(initial, policy.folder, "the checkpoint")
    prompts = PROMPTS.read(layout.prompts("test"))
    room = params.sections(values, SamplerSettings).sampling.max_tokens
    inputs = []
    for one in (initial, policy):
        tokenizer = load_tokenizer(one.folder, trust_remote_code=one.trust_remote_code)
        stops = stop_token_ids(one.folder, tokenizer)
        inputs.append(
            {"stop tokens": stops, "prompts": encode_prompts(prompts, tokenizer, one, room)}
        )
    if differ := [what for what in inputs[0] if inputs[0][what] != inputs[1][what]]:
        raise ArtifactError(
            f"the checkpoint in {policy.folder} has other {differ[0]} than the policy in "
            f"{initial.folder}: copy that policy's tokenizer files, chat template and "
            "generation_config.json into it"
        )


def show(layout: Layout, values: Mapping[str, Any]) -> str:
    """Add the imports to the report's page, if there is one, and return where they are shown.
    Raise ArtifactError for a damaged import."""
    page = layout.report / "index.html"
    if not page.exists():
        return "the report of the next `winnow run` shows it"
    write_external(layout, report_settings(values).num_bootstrap)
    return f"the report shows it: {page}"


def report_settings(values: Mapping[str, Any]) -> ReportSettings:
    return params.section(values, "report", ReportSettings)
