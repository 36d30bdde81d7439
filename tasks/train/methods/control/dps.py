"""`dps`: sample the prompts most likely to have a mixed group, by a Markov chain of each prompt's
difficulty (Dynamics-Predictive Sampling, arXiv 2603.10887; rule from the authors' code).

A prompt is in one of three states: none, some or all of its group's rollouts are correct. Its
transition matrix has Dirichlet counts that start at one and are discounted by `memory`. A group
reveals the state; the chain predicts the next one. Prompts that are not visited drift back to the
prior, so all are sampled again. A step draws `candidates` batches of prompts at random and takes
the prompts with the largest predicted chance of a mixed group; ties are broken by the draw (in the
authors' code by the prompt's index). The plan gives the pool, the group sizes and the budget, not
the order. Left out: the entropy bonus."""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import at_least, settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control.prompt_pool import PoolControl, PromptPool

NONE, SOME, ALL = 0, 1, 2


@settings
class Settings:
    memory: float = 0.7  # factor of earlier transitions per step
    candidates: int = 8  # candidate prompts per chosen prompt

    def __post_init__(self) -> None:
        share(train__control__memory=self.memory)
        at_least(1, train__control__candidates=self.candidates)


@dataclass
class State:
    """For each of P prompts the counts of transitions [P, to, from], the belief about its state at
    the last step [P, 3], and whether it was ever sampled; the number of rollouts spent."""

    counts: Floats
    beliefs: Floats
    seen: Ints
    spent: int = 0


class Method(PoolControl):
    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.pool = settings, PromptPool.of(plan)
        num = plan.num_prompts
        self.state = State(
            np.ones((num, 3, 3)), np.full((num, 3), 1 / 3), np.zeros(num, dtype=np.int64)
        )

    def choose(self, room: int, rng: np.random.Generator) -> Ints:
        pool, state = self.pool, self.state
        drawn = rng.permutation(len(pool.prompt_rows))
        drawn = pool.take(drawn, room * self.settings.candidates)
        rows = pool.prompt_rows[drawn]
        chance = predict(state.counts[rows], state.beliefs[rows])[:, SOME]
        return pool.take(drawn[np.argsort(-chance, kind="stable")], room)

    def observe(self, rollouts: Rollouts) -> None:
        """Update the chain of every prompt sampled so far: from the observed state if the step has
        graded rollouts of the prompt, otherwise by prediction."""
        size_Q, correct_Q = rollouts.graded_Q()
        shown_Q = np.where(correct_Q == 0, NONE, np.where(correct_Q == size_Q, ALL, SOME))
        rows, state, memory = rollouts.prompt_rows_Q, self.state, self.settings.memory
        rest = state.seen > 0
        rest[rows[size_Q > 0]] = False
        state.beliefs[rest] = predict(state.counts[rest], state.beliefs[rest])
        state.counts[rest] = forget(state.counts[rest], memory)
        for row, shown in zip(rows[size_Q > 0], shown_Q[size_Q > 0], strict=True):
            state.counts[row], state.beliefs[row] = seen(
                state.counts[row], state.beliefs[row], int(shown), memory
            )
            state.seen[row] = 1

    def describe(self) -> dict[str, float]:
        """Return the share of prompts sampled, and the mean predicted chance of a mixed group."""
        rows, state = self.pool.prompt_rows, self.state
        chance = predict(state.counts[rows], state.beliefs[rows])[:, SOME]
        seen = float(state.seen[rows].mean())
        return {"seen_rate": seen, "predicted_mixed_mean": float(chance.mean())}


def transitions(counts: Floats) -> Floats:
    """Return [..., to, from] the expected transition matrix of Dirichlet counts."""
    return np.asarray(counts / counts.sum(-2, keepdims=True))


def predict(counts: Floats, beliefs: Floats) -> Floats:
    """Return [P, 3] the beliefs about the next state."""
    return np.asarray(np.einsum("pij,pj->pi", transitions(counts), beliefs))


def seen(counts: Floats, belief: Floats, shown: int, memory: float) -> tuple[Floats, Floats]:
    """Return a prompt's updated counts [3, 3] and belief [3] after a group in the state `shown`."""
    joint = np.zeros((3, 3))
    joint[shown] = transitions(counts)[shown] * belief
    return forget(counts, memory) + joint / joint.sum(), np.eye(3)[shown]


def forget(counts: Floats, memory: float) -> Floats:
    """Return the counts, moved part of the way back to the prior of one."""
    return memory * counts + (1.0 - memory)
