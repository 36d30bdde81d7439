"""Completions that a warm start imitates."""

import logging
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError
from tasks.models.prompts import encode_plain
from tasks.train.data.columns import Ints
from tasks.train.data.profile import Profile
from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.settings import WarmStart

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Demonstrations:
    """Completions to imitate: for each, the row of its prompt among the training prompts, and its
    token ids with the stop token. For example Demonstrations([0, 2], [[11, 2], [7, 7, 2]])."""

    prompt_rows: Ints
    token_ids: list[list[int]]

    def rollouts(self, prompts: Prompts, rows: Ints) -> Rollouts:
        """Return the demonstrations at `rows` as rollouts, each in its own group. They are marked
        as replayed, since no policy sampled them, and their log-probabilities are not used."""
        token_ids, num = [self.token_ids[row] for row in rows.tolist()], len(rows)
        rollouts = make_rollouts(
            self.prompt_rows[rows],
            prompts.token_ids(self.prompt_rows[rows]),
            np.arange(num),
            token_ids=token_ids,
            logprobs=[[0.0] * len(ids) for ids in token_ids],
            versions=[[0] * len(ids) for ids in token_ids],
            reason="stop",
            outcome="correct",
            reward=1.0,
            replayed=True,
        )
        num_tokens = sum(map(len, token_ids))
        return rollouts.estimated(np.ones(num, dtype=np.bool_), np.ones(num_tokens))


def read_demonstrations(
    settings: WarmStart | None,
    max_tokens: int,
    prompts: Prompts,
    profile: Profile,
    tokenizer: PreTrainedTokenizerBase,
) -> Demonstrations | None:
    """Return the completions of the run's warm start, without those of more than `max_tokens`; None
    for a run without a warm start. Raise ArtifactError if there are none."""
    if settings is None:
        return None
    if settings.data == "profile":
        is_correct = (profile.samples["outcome"] == "correct").to_numpy()
        correct = profile.samples.filter(is_correct)["token_ids"].to_list()
        if not correct:
            raise ArtifactError(
                "train.warm_start.data is profile, but no sample of the profile is correct among "
                "the prompts of the plan: raise profile.num_samples, use easier prompts, or set "
                "data: solutions"
            )
        return Demonstrations(profile.rows[is_correct], correct)
    texts = prompts.table["solution"]
    rows = texts.is_not_null().arg_true().to_numpy().astype(np.int64)
    if not len(rows):
        raise ArtifactError(
            "train.warm_start.data is solutions, but no training prompt has a worked solution: "
            "name its field as `solution` in the settings of the source (preset mapping), use a "
            "source that has solutions (gsm8k, math), or set data: profile"
        )
    token_ids = [
        [*encode_plain(text, tokenizer, add_special_tokens=False), int(tokenizer.eos_token_id)]
        for text in texts.drop_nulls()
    ]
    is_short = np.array([len(ids) <= max_tokens for ids in token_ids])
    logger.info("warm start: %d of %d solutions fit sampling.max_tokens", is_short.sum(), len(rows))
    if not is_short.any():
        raise ArtifactError(
            "train.warm_start: every worked solution has more tokens than sampling.max_tokens "
            f"{max_tokens}: raise it, or set data: profile"
        )
    return Demonstrations(rows[is_short], [token_ids[row] for row in np.flatnonzero(is_short)])
