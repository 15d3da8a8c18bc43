"""Losses against loops, and what padding, masks and microbatches must not change."""

import math

import jax
import numpy as np
import pytest

from ragen_jax.algo import kl_estimate, policy_loss, token_weights, value_loss, weighted_sum

AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def batch(seed, b=6, t=11):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=(b, t)).astype(np.float32)
    behaviour = logprobs + rng.normal(scale=0.8, size=(b, t)).astype(np.float32)
    advantages = rng.normal(size=(b, t)).astype(np.float32)
    mask = rng.random((b, t)) < 0.6
    mask[1] = False
    return logprobs, behaviour, advantages, mask


def policy_loop(logprobs, behaviour, advantages, mask, low, high, dual):
    loss, clipped = np.zeros(mask.shape), np.zeros(mask.shape, bool)
    for i in zip(*np.nonzero(mask), strict=True):
        a = float(advantages[i])
        ratio = math.exp(float(logprobs[i]) - float(behaviour[i]))
        if a >= 0:
            loss[i], clipped[i] = -a * min(ratio, 1 + high), a > 0 and ratio > 1 + high
        else:
            loss[i], clipped[i] = -a * max(ratio, 1 - low), ratio < 1 - low
            if dual is not None and ratio > dual:
                loss[i], clipped[i] = -a * dual, True
    return loss, clipped


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
def test_policy_loss(jit, dual):
    arrays = batch(0, b=20)

    def call(*arrays):
        return policy_loss(*arrays, clip_low=0.2, clip_high=0.28, dual_clip=dual)

    loss, clipped = (jax.jit(call) if jit else call)(*arrays)
    expected_loss, expected_clipped = policy_loop(*arrays, 0.2, 0.28, dual)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(clipped, expected_clipped)
    gradient = np.asarray(jax.jit(jax.grad(lambda *a: call(*a)[0].sum()))(*arrays))
    assert np.all(gradient[expected_clipped] == 0)
    assert np.all(gradient[arrays[3] & ~expected_clipped] != 0)


def test_on_policy_gradient_is_the_advantage():
    logprobs, _, advantages, mask = batch(1)

    @jax.jit
    @jax.grad
    def gradient_at(x):
        return policy_loss(x, logprobs, advantages, mask, **CLIP)[0].sum()

    gradient = gradient_at(logprobs)
    np.testing.assert_allclose(gradient, np.where(mask, -advantages, 0), rtol=1e-6)


def test_nothing_off_the_mask_is_seen():
    *arrays, mask = batch(2)

    @jax.jit
    def evaluate(*arrays):
        def total(*arrays):
            loss, clipped = policy_loss(*arrays, mask, **CLIP)
            return loss.sum(), (loss, clipped)

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*arrays)

    clean = jax.tree.leaves(evaluate(*arrays))
    for junk in (np.nan, np.inf, -np.inf):
        dirty = evaluate(*(np.where(mask, array, np.float32(junk)) for array in arrays))
        for expected, got in zip(clean, jax.tree.leaves(dirty), strict=True):
            np.testing.assert_array_equal(got, expected)
            assert np.all(np.asarray(got)[~mask] == 0)


def test_a_huge_ratio_does_not_overflow():
    one = np.ones((1, 2), np.float32)
    advantages = np.array([[1.0, -1.0]], np.float32)

    def total(x):
        return policy_loss(x, -200 * one, advantages, one > 0, clip_low=0.2, clip_high=0.2)[0].sum()

    loss, gradient = jax.jit(jax.value_and_grad(total))(one)
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))


def test_a_dual_clip_below_one_is_refused():
    arrays = batch(0)
    with pytest.raises(ValueError, match="above 1"):
        policy_loss(*arrays, clip_low=0.2, clip_high=0.2, dual_clip=0.5)


@pytest.mark.parametrize("max_tokens", [None, 50])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_are_the_mean_they_are_named_after(aggregation, max_tokens):
    values, _, _, mask = batch(3)
    rows = [values[b][mask[b]].astype(np.float64) for b in range(len(mask)) if mask[b].any()]
    expected = {
        "token_mean": np.concatenate(rows).mean(),
        "sequence_mean_token_mean": np.mean([row.mean() for row in rows]),
        "sequence_mean_token_sum": np.mean([row.sum() / (max_tokens or 1) for row in rows]),
    }[aggregation]
    weights = jax.jit(lambda m: token_weights(m, aggregation=aggregation, max_tokens=max_tokens))(mask)
    np.testing.assert_allclose(weighted_sum(values, weights), expected, rtol=1e-5)
    assert np.all(np.asarray(weights)[~mask] == 0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_microbatches_and_padding_do_not_change_the_loss(aggregation):
    arrays = batch(4)

    def total(logprobs, behaviour, advantages, mask, weights):
        return weighted_sum(policy_loss(logprobs, behaviour, advantages, mask, **CLIP)[0], weights)

    evaluate = jax.jit(jax.value_and_grad(total))
    weigh = jax.jit(lambda mask: token_weights(mask, aggregation=aggregation))
    weights = np.asarray(weigh(arrays[3]))
    whole, gradient = evaluate(*arrays, weights)

    parts = [evaluate(*(a[i : i + 2] for a in (*arrays, weights))) for i in (0, 2, 4)]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), gradient, rtol=1e-6)

    # three columns in front, four behind, two rows below; junk in the padding
    padded = [
        np.pad(a, ((0, 2), (3, 4)), constant_values=False if a.dtype == bool else np.nan) for a in arrays
    ]
    loss, padded_gradient = evaluate(*padded, weigh(padded[3]))
    np.testing.assert_allclose(loss, whole, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(padded_gradient)[:-2, 3:-4], gradient, rtol=1e-6)
    assert np.all(np.asarray(padded_gradient)[~padded[3]] == 0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_empty_mask_weighs_nothing(aggregation):
    weights = jax.jit(lambda mask: token_weights(mask, aggregation=aggregation))(np.zeros((3, 4), bool))
    np.testing.assert_array_equal(weights, 0)


def test_weight_zero_hides_what_is_not_finite():
    values, weights = np.array([[2.0, np.nan, np.inf]]), np.array([[0.5, 0.0, 0.0]])
    loss, gradient = jax.jit(jax.value_and_grad(weighted_sum))(values, weights)
    assert float(loss) == 1.0
    assert gradient.tolist() == [[0.5, 0.0, 0.0]]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates(jit, kind):
    p, q, _, _ = batch(5)

    def call(p, q):
        return kl_estimate(p, q, kind=kind)

    d = p.astype(np.float64) - q
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[kind]
    np.testing.assert_allclose((jax.jit(call) if jit else call)(p, q), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(call(p, p), 0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_average_to_the_kl(kind):
    rng = np.random.default_rng(6)
    p, q = rng.dirichlet(np.ones(8), size=2)
    estimate = np.asarray(kl_estimate(np.log(p)[None], np.log(q)[None], kind=kind))[0]
    np.testing.assert_allclose((p * estimate).sum(), (p * np.log(p / q)).sum(), rtol=1e-4)


@pytest.mark.parametrize("jit", [False, True])
def test_value_loss(jit):
    values, old, returns, _ = batch(7)

    def call(*arrays):
        return value_loss(*arrays, clip=0.5)

    expected = np.zeros(values.shape)
    for i in np.ndindex(values.shape):
        v, o, r = float(values[i]), float(old[i]), float(returns[i])
        near = min(max(v, o - 0.5), o + 0.5)
        expected[i] = max((v - r) ** 2, (near - r) ** 2) / 2
    got = (jax.jit(call) if jit else call)(values, old, returns)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="median"):
        token_weights(np.ones((1, 1), bool), aggregation="median")
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(np.ones((1, 1)), np.ones((1, 1)), kind="k4")
