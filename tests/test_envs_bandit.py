"""Bandit: order, payouts, the expert that does not know the answer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.bandit import TEST_PAIRS, TRAIN_PAIRS, Bandit

N = 4000


@pytest.fixture(scope="module")
def env():
    return Bandit()


def test_payouts_match_their_means_and_the_low_arm_never_varies(env):
    states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), N))
    step = jax.jit(jax.vmap(env.step, in_axes=(0, None)))
    _, low = step(states, env.actions.index("Phoenix"))
    assert set(np.unique(low.reward)) == {np.float32(0.1)}
    assert not low.extras["success"].any()
    _, high = step(states, env.actions.index("Dragon"))
    assert set(np.unique(high.reward)) == {np.float32(0.0), np.float32(1.0)}
    # Four standard deviations of a mean of 4,000 draws at 0.25.
    assert abs(float(high.reward.mean()) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / N)
    assert high.extras["success"].all()
    assert (high.step_type == 2).all()
    assert (high.discount == 0).all()
    assert high.reward.dtype == jnp.float32


def test_display_order_is_even_and_is_what_is_observed(env):
    states, steps = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), N))
    texts = [env.template.render_text(row) for row in np.asarray(steps.observation)]
    first = "Arms: Phoenix or Dragon\n"
    assert set(texts) == {first, "Arms: Dragon or Phoenix\n"}
    assert abs(np.mean([text == first for text in texts]) - 0.5) < 4 * np.sqrt(0.25 / N)
    assert env.describe(jax.tree.map(lambda x: x[0], states)) + "\n" == texts[0]


def test_expert_takes_either_arm_equally_often_whatever_the_order(env):
    states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(2), N))
    keys = jax.random.split(jax.random.key(3), N)
    demo = jax.jit(jax.vmap(lambda s, k: env.demonstrate(s, k, 3)))(states, keys)
    chosen = np.asarray(demo.actions)
    assert (chosen[:, 1:] == -1).all()
    bound = 4 * np.sqrt(0.25 / N)
    assert abs(np.mean(chosen[:, 0] == env.actions.index("Dragon")) - 0.5) < bound
    assert abs(np.mean(chosen[:, 0] == np.asarray(states.shown)[:, 0]) - 0.5) < bound
    names = [env.actions[i] for i in (*states.shown[0], chosen[0, 0])]
    expected = "The choice is {} or {}. I try {}.".format(*names)
    assert env.thought.render_text(np.asarray(demo.thought[0])) == expected


def test_members_share_the_prompt_and_draw_their_own_payouts(env):
    state, first = env.reset(jax.random.key(4))
    members = jax.random.split(jax.random.key(5), 64)
    step = jax.jit(jax.vmap(lambda key: env.step(state._replace(key=key), 1)[1]))
    payouts = np.asarray(step(members).reward)
    assert 0 < payouts.sum() < 64
    np.testing.assert_array_equal(payouts, step(members).reward)
    np.testing.assert_array_equal(step(members).observation[7], first.observation)


def test_second_step_changes_nothing_and_pays_nothing(env):
    step = jax.jit(chex.assert_max_traces(env.step, n=1))
    state, _ = env.reset(jax.random.key(6))
    assert float(env.optimal_success(state, 1)) == 1.0
    state, _ = step(state, jnp.int32(0))
    assert float(env.optimal_success(state, 1)) == 0.0
    after, timestep = step(state, jnp.int32(1))
    chex.assert_trees_all_equal(after.chosen, state.chosen)
    assert float(timestep.reward) == 0.0
    assert not timestep.extras["success"]


def test_several_pairs_show_one_pair_and_accept_only_its_names():
    env = Bandit(pairs=TRAIN_PAIRS)
    assert len(env.actions) == 24
    assert len(TEST_PAIRS) == 8
    states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(7), 500))
    shown = np.asarray(states.shown)
    pairs = {frozenset(env.actions[i] for i in row) for row in shown}
    assert pairs == {frozenset(pair) for pair in TRAIN_PAIRS}
    valid = np.asarray(jax.vmap(env.valid_actions)(states))
    assert (valid.sum(axis=1) == 2).all()
    assert np.take_along_axis(valid, shown, axis=1).all()


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"low": "Same", "high": "same"}, "must differ"),
        ({"low_reward": 0.15}, "low_reward must be a multiple"),
        ({"high_prob": 1.5}, "high_prob"),
        ({"low": " x"}, "whitespace"),
    ],
)
def test_bad_parameters_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        Bandit(**kwargs)
