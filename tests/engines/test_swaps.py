"""New weights in the middle of completions: each token's log-probability is that of the weights
which the server says wrote it."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transformers import PreTrainedModel

from tasks.engines.engine import OnEnded, Request, Samples
from tasks.engines.loading import load_engine
from tasks.engines.server.engine import ServerEngine
from tasks.engines.settings import Sampling
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import SETTINGS, logprob_gaps, scaled

SAMPLING = Sampling(temperature=0.9, top_p=1.0, top_k=0, max_tokens=300, seed=0)
PROMPTS = [[20 + i, 14, 20, 3, 32] for i in range(4)]
REQUEST = Request(PROMPTS, [4] * 4, list(range(16)), SAMPLING)
FACTORS = (1.0, 1.3, 1.7)  # of all weights, in versions 0, 5 and 6


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[ServerEngine]:
    engine = load_engine(dataclasses.replace(SETTINGS, num_replicas=1), policy)
    assert isinstance(engine, ServerEngine)
    yield engine
    engine.close()


def in_the_middle(change: Callable[[], None]) -> OnEnded:
    """What `generate` calls when a completion has ended: the first time it starts `change`."""
    began = threading.Event()

    def call(*_: object) -> None:
        if not began.is_set():
            began.set()
            threading.Thread(target=change).start()

    return call


def largest_gap(samples: Samples, models: dict[int, PreTrainedModel]) -> float:
    """The largest |difference| of a token's log-probability to that of its policy, given all before
    it."""
    assert samples.versions is not None
    versions_N = np.concatenate(samples.versions)
    gaps_N = {
        version: np.concatenate(logprob_gaps(model, REQUEST, samples))
        for version, model in models.items()
    }
    return max(float(gaps[versions_N == version].max()) for version, gaps in gaps_N.items())


@pytest.mark.vllm
@pytest.mark.slow
def test_tokens_are_of_the_policy_that_they_are_said_to_be_of(
    engine: ServerEngine, policy: Policy
) -> None:
    models = {v: scaled(policy, f) for v, f in zip((0, 5, 6), FACTORS, strict=True)}
    engine.set_weights(NamedWeights(models[0]), 0)
    swapped: list[str] = []

    def swap() -> None:
        for version in (5, 6):
            engine.swap_weights(NamedWeights(models[version]), version)
            swapped.append(engine.versions.current)
            time.sleep(0.3)

    samples = engine.generate(REQUEST, in_the_middle(swap))
    assert samples.versions is not None
    found = set(itertools.chain(*samples.versions))
    assert found == {0, 5, 6}
    assert len(swapped) == 2
    assert any(len(set(versions)) == 3 for versions in samples.versions)
    assert all(versions == sorted(versions) for versions in samples.versions)
    assert largest_gap(samples, models) < 1e-4
    assert max(gaps.max() for gaps in logprob_gaps(models[0], REQUEST, samples)) > 0.1
    # and from then on all is of the last
    again = engine.generate(REQUEST)
    assert again.versions is not None
    assert set(itertools.chain(*again.versions)) == {6}
