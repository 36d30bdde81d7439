"""Estimators of other trainers: published and hand-computed values, and corrections for a different
sampler."""

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tasks.common import params, recipes
from tasks.train.data.columns import Floats, nested
from tasks.train.data.rollouts import Rollouts, StepTotals
from tasks.train.learner.correction import corrected_tokens, far_tokens
from tasks.train.loading import settings_of
from tasks.train.methods.advantage import bnpo, grpo, maxrl, opo, pass_at, raw, reinforce_pp
from tasks.train.methods.loss import cispo, clip, dppo, gmpo, kl_cov, sapo, vespo
from tasks.train.needs import num_scorings
from tasks.train.settings import Correction, Rejection
from tests.train.steps import rollouts_of, tokens_of
from tests.train.worlds import make_trainer, make_world, sampled

REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]  # two groups of four
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
LENGTHS = [2, 4, 4, 4, 3, 3, 3, 6]


def advantages_of(
    module: ModuleType,
    rewards: list[float],
    groups: list[int],
    lengths: list[int] | None = None,
    **settings: Any,
) -> Floats:
    arguments = (module.Settings(**settings),) if hasattr(module, "Settings") else ()
    found: Floats = module.Method(*arguments)(rollouts_of(rewards, groups, lengths))
    return found


def group_of(correct: int, size: int) -> list[float]:
    """Return the rewards of a group, the correct ones first."""
    return [1.0] * correct + [0.0] * (size - correct)


@pytest.mark.parametrize(("correct", "expected"), [(1, 7.0), (4, 1.0), (7, 1 / 7)])
def test_maxrl(correct: int, expected: float) -> None:
    found = advantages_of(maxrl, group_of(correct, 8), [0] * 8)
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[-1] == pytest.approx(-1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "high", "low", "of_rare"),
    [
        ("lite_ppo", 1.4031, -0.4677, 1.7371),  # .75 / sqrt(2/7); 7/8 / sqrt(33 * 31 / 64 / 63)
        ("cispo", 1.7321, -0.5774, 7.4833),  # .75 / sqrt(3/16); 7/8 / sqrt(7/8 / 64)
    ],
)
def test_grpo_can_divide_by_a_deviation_of_the_step(
    recipe: str, high: float, low: float, of_rare: float
) -> None:
    """The groups of eight are four of successes, three of failures, and one with one success."""
    train = settings_of(params.load(recipes.files()[recipe])["train"])
    scale = train.advantage["scale"]
    found = advantages_of(grpo, REWARDS, GROUPS, scale=scale)
    assert found == pytest.approx([high, low, low, low, -low, -low, -low, -high], abs=5e-5)
    rewards = [1.0] * 32 + [0.0] * 24 + group_of(1, 8)
    rare = advantages_of(grpo, rewards, np.repeat(range(8), 8).tolist(), scale=scale)
    assert rare[56] == pytest.approx(of_rare, abs=5e-5)
    assert not rare[:56].any()
    dead = advantages_of(grpo, [1.0, 1.0, 0.0], [0, 0, 1], scale=scale)
    assert dead.tolist() == [0.0, 0.0, 0.0]


def test_opo_weighs_the_baseline_by_length() -> None:
    found = advantages_of(opo, REWARDS, GROUPS, LENGTHS)
    first, second = 2 / 14, 9 / 15
    expected = [1 - first, -first, -first, -first, 1 - second, 1 - second, 1 - second, -second]
    assert found == pytest.approx(expected)


def test_reinforce_pp_whitens_over_tokens() -> None:
    plain = advantages_of(reinforce_pp, REWARDS, GROUPS, LENGTHS)
    assert set(plain.round(4)) == {1.2570, -0.7681}
    centred = advantages_of(reinforce_pp, REWARDS, GROUPS, LENGTHS, baseline=True)
    expected = [2.0158, -0.2767, -0.2767, -0.2767, 0.8696, 0.8696, 0.8696, -1.4229]
    assert centred == pytest.approx(expected, abs=5e-5)
    equal = advantages_of(reinforce_pp, REWARDS, GROUPS, [1] * 8, baseline=True)
    assert equal[:2] == pytest.approx([1.6202, -0.5401], abs=5e-5)
    assert advantages_of(reinforce_pp, [1.0] * 4, [0, 0, 1, 1]).tolist() == [0.0] * 4


def test_bnpo_divides_by_the_density_of_the_fitted_beta() -> None:
    first, second = bnpo.beta_of(np.array([1 / 8, 1 / 4, 1 / 2, 3 / 4]))
    assert (first, second) == pytest.approx((1.2898, 1.4235), abs=5e-5)
    rewards = [reward for correct in (1, 2, 4, 6) for reward in group_of(correct, 8)]
    found = advantages_of(bnpo, rewards, np.repeat(range(4), 8).tolist())
    firsts = found.reshape(4, 8)[:, 0] / (1 - np.array([1 / 8, 1 / 4, 1 / 2, 3 / 4]))
    assert firsts == pytest.approx([0.9866, 0.8615, 0.8368, 0.9979], abs=5e-5)
    one = advantages_of(bnpo, group_of(2, 8), [0] * 8)
    assert one == pytest.approx([0.75] * 2 + [-0.25] * 6)  # one group: Dr. GRPO's
    rewards = [*group_of(1, 10), *group_of(1, 10), *group_of(1, 10)]  # equal but for rounding
    equal = advantages_of(bnpo, rewards, np.repeat(range(3), 10).tolist())
    assert equal[:2] == pytest.approx([0.9, -0.1])
    dead = advantages_of(bnpo, [1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1])
    assert dead[:2].tolist() == [0.0, 0.0]
    assert np.isfinite(dead).all()


def test_pass_at_k_is_shared_among_the_correct_rollouts() -> None:
    is_correct = np.array(group_of(2, 8)) > 0
    scores = pass_at.scores(is_correct, np.zeros(8, dtype=np.int64), 4)
    assert scores[[0, 7]] == pytest.approx([0.5, 0.3571], abs=5e-5)
    assert scores.sum() / 4 == pytest.approx(0.7857, abs=5e-5)
    found = advantages_of(pass_at, group_of(2, 8), [0] * 8, k=4)
    assert found == pytest.approx((scores - scores.mean()) * 8 / 4)
    # of four, one is correct: 1/2 and 1/6 less 0 and 1/3, the shares of others in pairs without it
    assert advantages_of(pass_at, group_of(1, 4), [0] * 4, k=2) == pytest.approx(
        [1 / 2] + [-1 / 6] * 3
    )
    many = pass_at.scores(np.arange(512) < 3, np.zeros(512, dtype=np.int64), 256)
    assert np.isfinite(many).all()
    short = pass_at.scores(np.array([True, False]), np.zeros(2, dtype=np.int64), 4)
    assert short.tolist() == [1.0, 1.0]  # pass@2 of a solved group of two
    assert advantages_of(pass_at, group_of(1, 4), [0] * 4, k=4).tolist() == [0.0] * 4
    assert pass_at.Method(pass_at.Settings(k=4)).min_group == 5


@pytest.mark.parametrize(("size", "k"), [(4, 2), (5, 3), (3, 1)])
def test_the_expected_gradient_of_pass_at_is_that_of_pass_at_k(size: int, k: int) -> None:
    """By enumeration: of 1 - (1 - p)^k, with respect to the logit of the chance p of a success."""
    p, total = 0.3, 0.0
    for outcomes in itertools.product([1.0, 0.0], repeat=size):
        rewards = np.array(outcomes)
        chance = np.prod(np.where(rewards > 0, p, 1 - p))
        found = advantages_of(pass_at, rewards.tolist(), [0] * size, k=k)
        total += chance * float(found @ (rewards - p))
    assert total == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p))


def test_raw_rewards() -> None:
    assert advantages_of(raw, [1.0, 0.0, 0.5], [0, 0, 0]).tolist() == [1.0, 0.0, 0.5]
    assert advantages_of(raw, [1.0, 0.0, 0.5], [0, 0, 0], wrong=-1).tolist() == [1.0, -1.0, 0.0]


SPEC = ("method", "entropy")
RATIOS = [0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0]


def gradients_of(module: ModuleType, advantage: float, **settings: Any) -> Floats:
    """Return the factor of A * grad log pi at each of RATIOS, for completions of one token."""
    logs = torch.tensor(RATIOS, dtype=torch.float64).log().requires_grad_()
    tokens = tokens_of(logs, advantage)
    loss, _ = module.Method(module.Settings(**settings))(tokens, StepTotals(1, 1, 1))
    loss.backward()
    assert logs.grad is not None
    return np.asarray(-logs.grad / advantage)


@pytest.mark.parametrize(
    ("module", "advantage", "settings", "expected"),
    [
        (cispo, 1.0, {}, [0.25, 0.5, 0.8, 1, 1.25, 2, 4]),
        (cispo, -2.0, {"cap": 1.5}, [0.25, 0.5, 0.8, 1, 1.25, 1.5, 1.5]),
        (sapo, 1.0, {}, [0.2179, 0.4700, 0.7921, 1, 1.2307, 1.5729, 0.7228]),
        (sapo, -1.0, {}, [0.2149, 0.4671, 0.7912, 1, 1.2287, 1.5362, 0.6304]),
        (vespo, 1.0, {}, [0.5930, 1.1204, 1.1662, 1, 0.7381, 0.1991, 0.0020]),
        (vespo, -1.0, {}, [0.0700, 0.3398, 0.7638, 1, 1.1846, 1.0827, 0.1586]),
        (clip, -1.0, {"dual": 3.0}, [0, 0, 0.8, 1, 1.25, 2, 0]),
        (clip, 1.0, {"dual": 3.0}, [0.25, 0.5, 0.8, 1, 1.25, 0, 0]),
        (clip, -1.0, {"max_ratio": 1.5}, [0, 0, 0.8, 1, 1.25, 0, 0]),
    ],
)
def test_the_gradient_at_a_ratio(
    module: ModuleType, advantage: float, settings: dict[str, Any], expected: list[float]
) -> None:
    """Published tables; VESPO at .8 and 1.25 is W^k exp(lambda (1 - W)) by hand."""
    assert gradients_of(module, advantage, **settings) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(("weight", "expected"), [(np.exp(0.5), 0.0426), (1.0, 1.0), (0.0, 0.0)])
def test_vespo_has_the_sampler_in_the_product_and_averages_over_tokens(
    weight: float, expected: float
) -> None:
    """The first of two completions has two tokens, whose weights are old policy / sampler: the
    product e gives e^2 exp(3 (1 - e)). Of three tokens each has a third."""
    logs = torch.zeros(3, dtype=torch.float64).requires_grad_()
    weights_N = torch.tensor([weight, weight, 1.0], dtype=torch.float64)
    tokens = tokens_of(logs, rows=[0, 0, 1], weights_N=weights_N)
    loss, _ = vespo.Method(vespo.Settings())(tokens, StepTotals(3, 2, 9))
    (found,) = torch.autograd.grad(-3 * loss, logs)
    assert found.tolist() == pytest.approx([expected, expected, 1.0], abs=5e-5)


@pytest.mark.parametrize("settings", [{"dual": 3.0}, {"max_ratio": 3.0}])
def test_a_dual_clip_and_a_largest_ratio_bound_the_objective(settings: dict[str, Any]) -> None:
    tokens = tokens_of(torch.tensor([5.0]).log(), -1.0)
    loss, stats = clip.Method(clip.Settings(**settings))(tokens, StepTotals(1, 1, 1))
    assert -loss.item() == pytest.approx(-3.0)
    assert stats["clipped"].item() == 1


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_luspo_weighs_a_completion_by_its_length(shift: float) -> None:
    """The gradient is that of the mean of |y| min(s A, clip(s) A), over the token limit."""
    loss, limit = settings_of(params.load(recipes.FOLDER / "luspo.yaml")["train"]).loss, 9
    row_N, gains_B = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([1.0, -1.0, 2.0])
    moves = torch.tensor([0.001, 0.002, -0.001, 0.0005, 0.0003, 0.001]).double() + shift
    logs = (moves - 1.0).requires_grad_()
    tokens = tokens_of(logs, gains_B[row_N], -1.0, row_N)
    method = clip.Method(clip.Settings(**{k: v for k, v in loss.items() if k not in SPEC}))
    (found,) = torch.autograd.grad(method(tokens, StepTotals(6, 3, limit))[0], logs)
    terms = []
    for row in range(3):
        of_row = row_N == row
        ratio = (logs + 1.0)[of_row].mean().exp()
        bound = ratio.clamp(1 - 2e-3, 1 + 2.5e-3)
        terms.append(of_row.sum() * (ratio * gains_B[row]).minimum(bound * gains_B[row]))
    (expected,) = torch.autograd.grad(-torch.stack(terms).mean() / limit, logs)
    torch.testing.assert_close(found, expected)
    assert bool((expected == 0).any()) == (shift > 0)


def test_the_veto_rejects_the_whole_rollout() -> None:
    correction = settings_of(params.load(recipes.FOLDER / "veto.yaml")["train"]).correction
    gaps = [0.0, -9.3, 0.1, -9.2, 0.0]  # 9.1e-5 and 1.01e-4
    found = weights_of(gaps, [0, 0, 1, 1, 2], **vars(correction))
    assert found == [0.0, 0.0, 1.1052, 0.0001, 1.0]


def test_gmpo_uses_one_geometric_mean_per_completion() -> None:
    for sign, expected in ((1.0, 1.1618), (-1.0, 1.2214)):
        tokens = tokens_of(torch.tensor([0.5, -0.1]), sign, rows=[0, 0])
        loss, _ = gmpo.Method(gmpo.Settings())(tokens, StepTotals(2, 1, 2))
        assert -loss.item() == pytest.approx(sign * expected, abs=5e-5)


def test_a_masked_token_has_no_gradient_under_gmpo() -> None:
    logs = torch.tensor([0.1, 0.2, -0.3]).requires_grad_()
    tokens = tokens_of(logs, [0.0, 0.0, 1.0], rows=[0, 0, 0])
    loss, _ = gmpo.Method(gmpo.Settings())(tokens, StepTotals(3, 1, 3))
    loss.backward()
    assert logs.grad is not None
    assert logs.grad.tolist() == pytest.approx([0.0, 0.0, -1 / 3])  # the mean log-ratio is 0


@pytest.mark.parametrize(
    ("sampler", "policy", "advantage", "is_masked"),
    [
        (0.01, 0.05, 1.0, False),  # a ratio of 5, which a clip would cut
        (0.5, 0.75, 1.0, True),  # a ratio of 1.5
        (0.5, 0.75, -1.0, False),
        (0.75, 0.5, -1.0, True),
        (0.75, 0.5, 1.0, False),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"divergence": "kl", "limit": 0.05}])
def test_dppo_masks_by_probabilities(
    sampler: float, policy: float, advantage: float, is_masked: bool, settings: dict[str, Any]
) -> None:
    log_N = torch.tensor([policy]).log().requires_grad_()
    tokens = tokens_of(log_N, advantage, torch.tensor([sampler]).log())
    loss, stats = dppo.Method(dppo.Settings(**settings))(tokens, StepTotals(1, 1, 1))
    loss.backward()
    assert log_N.grad is not None
    kept = 0.0 if is_masked else -advantage * policy / sampler
    assert log_N.grad.item() == pytest.approx(kept)
    assert bool(stats["clipped"].item()) == is_masked


def weights_of(
    gaps: list[float],
    rows: list[int],
    advantages: list[float] | None = None,
    moved: float = 0.0,
    **settings: Any,
) -> list[float]:
    """Return the weights of tokens whose old log-probability exceeds the sampler's by `gaps`; the
    policy's exceeds the old one by `moved`."""
    gaps_N, row_N = torch.tensor(gaps, dtype=torch.float64), torch.tensor(rows)
    gains_N = torch.tensor(advantages or [1.0] * len(gaps))
    zeros_N, correction = torch.zeros_like(gaps_N), Correction(**settings)
    tokens, cut_N = corrected_tokens(
        zeros_N + moved, zeros_N, -gaps_N, gains_N, row_N, max(rows) + 1, correction
    )
    assert (tokens.weights_N[cut_N] != gaps_N.exp()[cut_N]).all() or correction.ratio_to != "old"
    return [round(weight, 4) for weight in tokens.weights_N.tolist()]


def test_weights_have_a_floor_and_a_geometric_level() -> None:
    gaps = np.log([0.2, 1.0, 6.0]).tolist()
    assert weights_of(gaps, [0, 1, 2], floor=0.5, cap=5.0) == [0.5, 1.0, 5.0]
    assert weights_of(gaps, [0, 1, 2], floor=0.5, cap=5.0, mode="mask") == [0.0, 1.0, 0.0]
    gaps = [0.02, -0.01, 0.03, 0.0]
    assert weights_of(gaps, [0] * 4, level="geometric") == [1.0101] * 4
    assert weights_of(gaps, [0] * 4, level="sequence") == [1.0408] * 4


def test_rejection_is_independent_of_the_weight() -> None:
    gaps, rows = [0.5, 0.0, -12.0, 0.1], [0, 0, 1, 2]
    veto = Rejection(low=1e-4, whole_rows=True)
    assert weights_of(gaps, rows, reject=veto) == [1.6487, 1.0, 0.0, 1.1052]
    gaps = [0.5, 0.0, 0.02, -0.02]
    narrow = Rejection(level="geometric", low=0.99, high=1.1)
    assert weights_of(gaps, [0, 0, 1, 1], reject=narrow) == [0.0, 0.0, 1.0202, 0.9802]
    any_token = Rejection(high=1.5, whole_rows=True)
    assert weights_of(gaps, [0, 0, 1, 1], reject=any_token) == [0.0, 0.0, 1.0202, 0.9802]
    one_token = Rejection(high=1.5)
    assert weights_of(gaps, [0, 0, 1, 1], reject=one_token, ratio_to="sampler") == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0.04, [0]), (0.02, [0, 1]), (0.06, []), (1e-9, [0, 1, 2, 3, 4, 5])],
)
def test_m2po_drops_the_tokens_with_the_largest_gaps(limit: float, expected: list[int]) -> None:
    """The squares are .25, .09, .01, ...: their mean is .0584, without the first .0201."""
    gaps = np.array([0.5, -0.3, 0.1, 0.02, -0.01, 0.001])
    assert np.flatnonzero(far_tokens(gaps, limit)).tolist() == expected
    assert np.flatnonzero(far_tokens(gaps[::-1], limit)).tolist() == [5 - i for i in expected][::-1]
    assert far_tokens(np.zeros(0), limit).tolist() == []


def test_m2po_only_affects_far_tokens(guesser: Path, tmp_path: Path) -> None:
    """The test changes the sampler's log-probabilities of two tokens."""
    correction = {"m2po": 0.04}
    changes = {"advantage": {"method": "raw", "wrong": -1}, "correction": correction}
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 3), **changes)
    batch = sampled(trainer)
    logs_N = batch.fresh.logprobs_N.copy()
    num = len(logs_N)
    logs_N[[1, num - 1]] += np.sqrt(0.05 * num), -np.sqrt(0.03 * num)  # means .08, .03 without one
    moved = batch.fresh.with_columns(logprobs=nested(logs_N, batch.fresh.completion_tokens_B()))
    found = trainer.estimate(trainer.scored(moved), trainer.rng())
    assert np.flatnonzero(found.advantages_N == 0).tolist() == [1]
    near = trainer.estimate(trainer.scored(batch.fresh), trainer.rng())
    assert (near.advantages_N != 0).all()
    assert trainer.state.ledger.charged["score"] > 0.0  # the pass over the step


def test_the_limit_of_m2po_omits_tokens_without_a_gradient(guesser: Path, tmp_path: Path) -> None:
    """One token has a mean square of .05 over the trained tokens, and less over the step's."""
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 6), correction={"m2po": 0.04})
    fresh = sampled(trainer).fresh
    rewards = np.where(fresh.group_B == 0, np.arange(len(fresh.group_B)) % 2, 0.0)
    is_trained_N, logs_N = fresh.group_B[fresh.owner_N()] == 0, fresh.logprobs_N.copy()
    assert is_trained_N.mean() < 0.8
    logs_N[0] += np.sqrt(0.05 * is_trained_N.sum())
    moved = fresh.with_columns(
        logprobs=nested(logs_N, fresh.completion_tokens_B()), reward=rewards, outcome="wrong"
    )
    found = trainer.estimate(trainer.scored(moved), trainer.rng())
    assert np.flatnonzero(is_trained_N & (found.advantages_N == 0)).tolist() == [0]


def test_opsm_rejects_only_negative_rollouts() -> None:
    """The mean log-probability of both rollouts fell by more than 0.5 after sampling."""
    gaps, rows = [-0.6, -0.6, -0.6, -0.6], [0, 0, 1, 1]
    opsm = Rejection(level="geometric", low=np.exp(-0.5), only_negative=True)
    found = weights_of(gaps, rows, [1.0, 1.0, -1.0, -1.0], reject=opsm)
    assert found == [0.5488, 0.5488, 0.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "moved", "expected"),
    [("old", -0.45, 0.9048), ("present", -0.45, 0.0), ("present", -0.35, 0.9048)],
)
def test_opsm_can_test_the_present_policy(policy: Any, moved: float, expected: float) -> None:
    """The old policy is 0.1 below the sampler in log-probability, the present one 0.55 or 0.45."""
    opsm = Rejection(policy=policy, level="geometric", low=0.60653, only_negative=True)
    found = weights_of([-0.1] * 4, [0, 0, 1, 1], [1.0, 1.0, -1.0, -1.0], moved, reject=opsm)
    assert found == [0.9048, 0.9048, expected, expected]


def test_only_a_test_of_the_old_policy_needs_its_pass() -> None:
    for policy in ("old", "present"):
        correction = {"ratio_to": "sampler", "reject": {"policy": policy}}
        train = settings_of({"updates": {"epochs": 2}, "correction": correction})
        assert train.scores_old == (policy == "old")
        assert num_scorings(train) == (policy == "old")


# --- kl cov


def kl_cov_step(share: float = 0.2) -> tuple[Rollouts, kl_cov.Method]:
    """Return ten tokens of five rollouts; the last two rollouts have no effect."""
    gains = np.array([2.0, -1.0, 1.0, 3.0, 0.0])
    logs = np.array([-1.0, -4.0, -2.0, -1.0, -3.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    keep_B = np.array([True, True, True, False, True])
    rollouts = rollouts_of([0.0] * 5, [0, 0, 0, 1, 1], [2] * 5)
    rollouts = rollouts.with_columns(old_logprobs=logs.reshape(5, 2).tolist())
    rollouts = rollouts.estimated(keep_B, np.repeat(gains, 2))
    return rollouts, kl_cov.Method(kl_cov.Settings(share=share, penalty=0.5))


def test_kl_cov_marks_the_largest_covariances() -> None:
    """Tokens have A 2, 2, -1, -1, 1, 1 and log p -1, -4, -2, -1, -3, -1, around 2/3 and -2: 4/3,
    -8/3, 0, -5/3, -1/3, 1/3."""
    for share, expected in ((1e-9, [0]), (0.2, [0]), (0.34, [0, 5]), (0.5, [0, 2, 5])):
        rollouts, method = kl_cov_step(share)
        assert np.flatnonzero(method.marks(rollouts)).tolist() == expected
        shuffled = method.marks(rollouts.take(np.array([2, 0, 1, 4, 3])))
        assert shuffled.sum() == len(expected)
    rollouts, method = kl_cov_step()
    nothing = rollouts.estimated(np.zeros(5, dtype=np.bool_), np.zeros(10))
    assert not method.marks(nothing).any()


def test_kl_cov_penalises_marked_tokens() -> None:
    """Ratios 2, 1/2, 1 and, by rounding, nearly 1: the gradient of |log r| is its sign, or 0."""
    logs = torch.tensor([2.0, 0.5, 1.0, 2.0, 0.99999, 1.00001]).log().requires_grad_()
    tokens = tokens_of(logs, marked_N=torch.tensor([True, True, True, False, True, True]))
    loss, stats = kl_cov.Method(kl_cov.Settings(penalty=0.5))(tokens, StepTotals(1, 1, 1))
    loss.backward()
    assert logs.grad is not None
    assert (-logs.grad).tolist() == pytest.approx(
        [2.0 - 0.5, 0.5 + 0.5, 1.0, 2.0, 0.99999, 1.00001]
    )
    assert stats["clipped"].sum() == 5
