"""Advantage estimators against float64 loops written from their formulas."""

import jax
import numpy as np
import pytest

from ragen_jax.algo import gae, grpo, whiten

MODES = pytest.mark.parametrize("jit", [False, True])


def maybe_jit(function, jit, **settings):
    def call(*args):
        return function(*args, **settings)

    return jax.jit(call) if jit else call


def episodes(seed, b=5, t=23):
    """Rewards, values and a mask with gaps, with a row without a token."""
    rng = np.random.default_rng(seed)
    mask = rng.random((b, t)) < 0.6
    mask[-1] = False
    rewards = rng.normal(size=(b, t)) * mask
    return rewards.astype(np.float32), rng.normal(size=(b, t)).astype(np.float32), mask


def gae_loop(rewards, values, mask, gamma, lam):
    advantages = np.zeros(mask.shape)
    returns = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        steps = np.flatnonzero(mask[b])
        for i, t in enumerate(steps):
            total = 0.0
            for k, u in enumerate(steps[i:]):
                later = steps[i + k + 1 :]
                value_next = float(values[b, later[0]]) if later.size else 0.0
                delta = float(rewards[b, u]) + gamma * value_next - float(values[b, u])
                total += (gamma * lam) ** k * delta
            advantages[b, t] = total
            returns[b, t] = total + float(values[b, t])
    return advantages, returns


@MODES
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)])
def test_gae_is_the_sum_of_discounted_errors(jit, gamma, lam):
    rewards, values, mask = episodes(0)
    got = maybe_jit(gae, jit, gamma=gamma, lam=lam)(rewards, values, mask)
    for array, expected in zip(got, gae_loop(rewards, values, mask, gamma, lam), strict=True):
        np.testing.assert_allclose(array, expected, atol=2e-5)
        assert np.all(np.asarray(array)[~mask] == 0)


def test_gae_by_hand():
    # two sampled tokens with an observation of two columns between them
    advantages, returns = maybe_jit(gae, True, gamma=0.5, lam=0.5)(
        np.array([[0.0, 0.0, 0.0, 1.0]], np.float32),
        np.array([[0.5, 9.0, 9.0, 0.25]], np.float32),
        np.array([[True, False, False, True]]),
    )
    # last: 1 - 0.25; first: 0 + 0.5 * 0.25 - 0.5 + 0.25 * 0.75
    np.testing.assert_allclose(advantages, [[-0.1875, 0, 0, 0.75]])
    np.testing.assert_allclose(returns, [[0.3125, 0, 0, 1.0]])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_one_is_return_minus_value(gamma):
    rewards, values, mask = episodes(1)
    advantages, returns = maybe_jit(gae, True, gamma=gamma, lam=1.0)(rewards, values, mask)
    expected = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        tail = 0.0
        for t in np.flatnonzero(mask[b])[::-1]:
            tail = rewards[b, t] + gamma * tail
            expected[b, t] = tail
    np.testing.assert_allclose(returns, expected, atol=1e-5)
    np.testing.assert_allclose(advantages, np.where(mask, expected - values, 0), atol=1e-5)


def test_gae_does_not_see_what_is_off_the_mask():
    rewards, values, mask = episodes(2)
    dirty_rewards, dirty_values = np.where(mask, rewards, np.nan), np.where(mask, values, np.nan)
    estimate = maybe_jit(gae, True, gamma=0.9, lam=0.8)
    for clean, dirty in zip(
        estimate(rewards, values, mask), estimate(dirty_rewards, dirty_values, mask), strict=True
    ):
        np.testing.assert_array_equal(clean, dirty)


@MODES
@pytest.mark.parametrize("normalize_std", [False, True])
def test_grpo_normalises_in_groups(jit, normalize_std):
    rng = np.random.default_rng(3)
    returns = rng.normal(size=12).astype(np.float32)
    mask = rng.random((12, 7)) < 0.5
    got = maybe_jit(grpo, jit, group_size=4, normalize_std=normalize_std)(returns, mask)
    expected = np.zeros(mask.shape)
    for b in range(12):
        group = [float(returns[i]) for i in range(b // 4 * 4, b // 4 * 4 + 4)]
        mean = sum(group) / 4
        std = (sum((r - mean) ** 2 for r in group) / 3) ** 0.5
        for t in range(7):
            if mask[b, t]:
                expected[b, t] = (returns[b] - mean) / (std + 1e-6 if normalize_std else 1)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.all(np.asarray(got)[~mask] == 0)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1.3, 10.9])
def test_a_group_of_equal_returns_has_no_advantage(constant):
    returns = np.full(12, constant, np.float32)
    returns[:4] = np.arange(4)
    with jax.debug_nans(True):
        advantages = np.asarray(maybe_jit(grpo, True, group_size=4)(returns, np.ones((12, 3), bool)))
    assert np.all(advantages[4:] == 0)
    assert np.all(advantages[:4] != 0)


def test_an_all_zero_batch_stays_finite():
    @jax.jit
    def estimate(zeros, mask):
        advantages, returns = gae(zeros, zeros, mask, gamma=1.0, lam=1.0)
        grouped = grpo(zeros[:, 0], mask, group_size=2)
        return advantages, returns, grouped, whiten(advantages, mask), whiten(grouped, mask)

    zeros = np.zeros((4, 6), np.float32)
    with jax.debug_nans(True):
        for on in (True, False):  # False: not one token in the batch
            for array in estimate(zeros, np.full((4, 6), on)):
                np.testing.assert_array_equal(array, 0)


@MODES
def test_whiten_uses_the_statistics_of_the_mask(jit):
    _, advantages, mask = episodes(4)
    got = np.asarray(maybe_jit(whiten, jit)(np.where(mask, advantages, np.nan), mask))
    chosen = advantages[mask].astype(np.float64)
    np.testing.assert_allclose(got[mask], (chosen - chosen.mean()) / chosen.std(ddof=1), atol=1e-5)
    assert np.all(got[~mask] == 0)


def test_groups_of_one_are_refused():
    with pytest.raises(ValueError, match="group_size >= 2"):
        grpo(np.zeros(4), np.ones((4, 2), bool), group_size=1)
    with pytest.raises(ValueError, match="groups of 3"):
        grpo(np.zeros(4), np.ones((4, 2), bool), group_size=3)
