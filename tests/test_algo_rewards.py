"""Reward placement and packing, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algo import pack_columns, place_rewards


@pytest.mark.parametrize("jit", [False, True])
def test_a_turn_reward_lands_on_its_last_sampled_token(jit):
    #                     system  turn 0 (obs, sampled)  pad  turn 1
    turn_ids = np.array([[-1, -1, 0, 0, 0, -1, 1, 1, 1], [-1, -1, 0, 0, 0, 0, -1, -1, -1]])
    ends = np.zeros(turn_ids.shape, bool)
    ends[0, 4] = ends[0, 8] = ends[1, 5] = True
    rewards = np.array([[0.0, 10.9, 7.0], [-0.1, 5.0, 5.0]], np.float32)  # unplayed turns hold junk
    place = jax.jit(place_rewards) if jit else place_rewards
    expected = np.zeros(turn_ids.shape, np.float32)
    expected[0, 8], expected[1, 5] = 10.9, -0.1
    np.testing.assert_array_equal(place(rewards, ends, turn_ids), expected)


def test_placed_rewards_add_up_to_the_played_turns():
    rng = np.random.default_rng(0)
    turn_ids = np.sort(rng.integers(-1, 4, size=(6, 40)), axis=1)
    ends = np.zeros(turn_ids.shape, bool)
    rewards = rng.normal(size=(6, 4)).astype(np.float32)
    total = np.zeros(6)
    for b in range(6):
        for turn in range(4):
            columns = np.flatnonzero(turn_ids[b] == turn)
            if columns.size:
                ends[b, columns[-1]] = True
                total[b] += rewards[b, turn]
    np.testing.assert_allclose(place_rewards(rewards, ends, turn_ids).sum(axis=1), total, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_packing_keeps_order_and_clears_the_rest(jit):
    rng = np.random.default_rng(1)
    valid = rng.random((5, 17)) < 0.5
    valid[3], valid[4] = False, True
    tokens = rng.integers(1, 1000, size=(5, 17)).astype(np.int32)
    logprobs = rng.normal(size=(5, 17)).astype(np.float32)
    mask = rng.random((5, 17)) < 0.5
    arrays = (tokens, logprobs, mask)
    got = (jax.jit(pack_columns) if jit else pack_columns)(valid, *arrays)
    assert [array.dtype for array in got] == [jnp.bool_, jnp.int32, jnp.float32, jnp.bool_]
    for array, source in zip(got, (valid, *arrays), strict=True):
        expected = np.zeros_like(source)
        for b in range(5):
            kept = [source[b, s] for s in range(17) if valid[b, s]]
            expected[b, : len(kept)] = kept
        np.testing.assert_array_equal(array, expected)
