"""`micro_groups`: groups of any size under a budget of KV cache memory, after Infinite Sampling
(arXiv 2506.22950).

The rollouts in flight are limited by `cache_megabytes`. The rollouts of a group share one prefill
of their prompt, and when one ends, the next takes its slot immediately. With a fixed number of
slots, the busiest slot determines the time, so rollouts expected to be long start first (`order:
lpt`). `sjf` (short first) is the paper's order, and worse except for streaming; `fifo` is the order
of continuous batching. Lengths are predicted by a ridge regression on the prompt's length and the
mean length of its earlier rollouts, fitted to the latest rollouts. A prediction affects only the
order: every rollout is completed, and is the same sample in any order. This is for engines that the
caller can schedule (`hf`); vLLM does its own scheduling within its memory limit. Left out:
predicting again from the tokens so far, which could not change rollouts that have started.

Legend: B rollouts, Q prompts of a request.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.common.params import ParamsError, settings
from tasks.engines.engine import Engine, Request, Samples, ScheduledEngine
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Generate, Requested

Order = Literal["fifo", "sjf", "lpt"]

HISTORY = 2048  # number of rollouts that the predictions are fitted to
FEWEST = 64  # minimum number of rollouts to predict lengths
TRUST = 4.0  # own rollouts at which a prompt's mean has the same weight as the mean of all


@settings
class Settings:
    cache_megabytes: float = 2.0  # limit on keys and values in memory
    order: Order = "lpt"  # order in which rollouts start


@dataclass
class State:
    """Per prompt, the numbers of rollouts and of their tokens so far; for the latest rollouts, the
    prompt tokens, the prompt's predicted mean length, and the length."""

    tokens: Floats
    rollouts: Floats
    history: Floats


class Method(Generate):
    def __init__(self, settings: Settings, num_prompts: int) -> None:
        self.settings = settings
        self.state = State(np.zeros(num_prompts), np.zeros(num_prompts), np.zeros((0, 3)))

    def generate(self, engine: Engine, request: Request, requested: Requested) -> Samples:
        """Return the samples of `request`, within the budget. Raise ParamsError if the engine
        schedules requests itself, or if the budget is too small for one rollout."""
        if not isinstance(engine, ScheduledEngine):
            raise ParamsError(
                f"train.generate.method micro_groups is for engine.name hf; {engine.name} has "
                "its own scheduler: set the method to batched, and limit memory by "
                "engine.memory_fraction"
            )
        longest = max(map(len, request.prompts), default=0)
        of_prompt = engine.cache_bytes(longest)
        of_row = engine.cache_bytes(longest + request.sampling.max_tokens)
        num_slots = int(self.settings.cache_megabytes * 2**20 // (of_row + of_prompt))
        if num_slots < 1:
            raise ParamsError(
                f"train.generate.cache_megabytes is {self.settings.cache_megabytes:g}, but one "
                f"rollout may need {(of_row + of_prompt) / 2**20:.3g}: raise it, or lower "
                "sampling.max_tokens"
            )
        lengths_B = self.predict(request, requested.prompt_rows)[request.owner_B()]
        return engine.generate_in_order(request, queue(lengths_B, self.settings.order), num_slots)

    def predict(self, request: Request, prompt_rows: Ints | None) -> Floats:
        """Return [Q] each prompt's predicted rollout length in tokens; zeros while fewer than
        FEWEST rollouts were observed."""
        history = self.state.history
        if len(history) < FEWEST:
            return np.zeros(len(request.prompts))
        tokens_Q, rollouts_Q = np.zeros(len(request.prompts)), np.zeros(len(request.prompts))
        if prompt_rows is not None:  # validation prompts have no statistics
            tokens_Q, rollouts_Q = self.state.tokens[prompt_rows], self.state.rollouts[prompt_rows]
        means_Q = expected_mean(tokens_Q, rollouts_Q, history[:, 2].mean())
        features = np.column_stack([[len(ids) for ids in request.prompts], means_Q])
        center = history.mean(0)
        centered = history - center
        known, lengths = centered[:, :2], centered[:, 2]
        slopes = np.linalg.solve(known.T @ known + np.eye(2), known.T @ lengths)  # ridge, penalty 1
        return np.asarray(center[2] + (features - center[:2]) @ slopes)

    def observe(self, rollouts: Rollouts) -> None:
        state, rows = self.state, rollouts.prompt_rows_Q[rollouts.group_B]
        lengths = rollouts.completion_tokens_B().astype(np.float64)
        mean = state.history[:, 2].mean() if len(state.history) else lengths.mean()
        expected = expected_mean(state.tokens[rows], state.rollouts[rows], mean)
        new = np.column_stack([rollouts.prompt_tokens_B(), expected, lengths])
        state.history = np.concatenate([state.history, new])[-HISTORY:]
        np.add.at(state.tokens, rows, lengths)
        np.add.at(state.rollouts, rows, 1.0)


def expected_mean(tokens_Q: Floats, rollouts_Q: Floats, mean: float) -> Floats:
    """Return [Q] the mean length of a prompt's own rollouts, shrunk towards the mean of all
    prompts, more so with fewer rollouts."""
    return np.asarray((tokens_Q + TRUST * mean) / (rollouts_Q + TRUST))


def queue(lengths_B: Floats, order: Order) -> Ints:
    """Return the rollouts' indices in starting order: by arrival, shortest first or longest first.
    Rollouts of equal predicted length stay in order of arrival, so groups stay together."""
    if order == "fifo":
        return np.arange(len(lengths_B))
    return np.argsort(lengths_B if order == "sjf" else -lengths_B, kind="stable")
