"""Prompts as the policy receives them, with their golds and the verifier's verdict on each gold."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from flows.reading.comparisons import RULE, escaped
from tasks.common import params
from tasks.common.artifacts import PROMPTS
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.engines.settings import Sampling
from tasks.grading.grader import Grader
from tasks.grading.settings import Verify
from tasks.models.policy import load_tokenizer, read_policy
from tasks.models.prompts import encode_prompts


def read(
    values: Mapping[str, Any], layout: Layout, split: str, prompt: str | None, number: int
) -> Iterator[str]:
    """Yield as text the first `number` prompts of a split or, if `prompt` is given, of those whose
    ids begin with it. `values` are all parameters. Raise ArtifactError if no prompt is found."""
    prompts = PROMPTS.read(layout.prompts(split))
    num_prompts = len(prompts)
    prompts = prompts.filter(pl.col("prompt_id").str.starts_with(prompt or "")).head(number)
    if prompts.is_empty():
        named = f" whose id begins with {prompt}" if prompt else ""
        raise ArtifactError(f"there is no {split} prompt{named}")
    policy = read_policy(layout)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    room = params.section(values, "sampling", Sampling).max_tokens
    encoded = encode_prompts(prompts, tokenizer, policy, room)
    with Grader(params.section(values, "verify", Verify)) as grader:
        verdicts = grader.check_golds(prompts.select("verifier", "answer").rows())
    yield f"{len(prompts)} of {num_prompts} {split} prompts"
    special = {id_: str(tokenizer.decode([id_])) for id_ in tokenizer.all_special_ids}
    for row, ids, verdict in zip(prompts.iter_rows(named=True), encoded, verdicts, strict=True):
        level = f", level {escaped(row['level'])}" if row["level"] else ""
        counts = Counter(special[one] for one in ids if one in special)
        marks = "".join(f", {number} {escaped(text)}" for text, number in counts.items())
        why = "" if verdict.outcome == "correct" else f" ({escaped(verdict.answer)})"
        yield (
            f"\n{RULE}\nprompt {row['prompt_id']}   {escaped(row['source'])}{level}   "
            f"{len(ids)} tokens{marks}\n\n{escaped(str(tokenizer.decode(ids)))}\n\n"
            f"gold: {escaped(row['answer'])}   {escaped(row['verifier'])}: {verdict.outcome}{why}"
        )
