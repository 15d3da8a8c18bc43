"""Environments by name, and what holds for every one of them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax


def test_names_and_make():
    assert envs_jax.names() == ["bandit", "frozen_lake", "sokoban"]
    assert envs_jax.make("frozen_lake", size=5).size == 5
    assert isinstance(envs_jax.make("bandit"), envs_jax.Bandit)


def test_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match=r"'frozenlake': did you mean 'frozen_lake'\?.*sokoban"):
        envs_jax.make("frozenlake")


def test_unknown_parameter_is_named_with_the_accepted_ones():
    with pytest.raises(
        ValueError, match=r"sokoban: unknown parameter 'boxes'; accepted: dim_room, num_boxes"
    ):
        envs_jax.make("sokoban", boxes=2)


@pytest.mark.parametrize("name", ["bandit", "frozen_lake", "sokoban"])
def test_every_environment_keeps_the_contract(name):
    env = envs_jax.make(name)
    reset = jax.jit(jax.vmap(chex.assert_max_traces(env.reset, n=1)))
    step = jax.jit(jax.vmap(chex.assert_max_traces(env.step, n=1)))
    states, first = reset(jax.random.split(jax.random.key(0), 8))
    reset(jax.random.split(jax.random.key(1), 8))
    env.observation_spec.validate(first.observation[0])
    assert first.observation.dtype == jnp.int32
    after, timestep = step(states, jnp.arange(8) % len(env.actions))
    step(after, jnp.zeros(8, dtype=int))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, states)
    chex.assert_trees_all_equal_shapes_and_dtypes(timestep, first)
    assert timestep.reward.dtype == jnp.float32
    low, high = env.reward_range
    assert ((timestep.reward >= low - 1e-6) & (timestep.reward <= high + 1e-6)).all()

    demo = jax.jit(jax.vmap(lambda s, k: env.demonstrate(s, k, 4)))(states, states.key)
    assert demo.actions.shape == (8, 4)
    assert demo.actions.dtype == demo.thought.dtype == jnp.int32
    assert (np.asarray(demo.actions[:, 0]) >= 0).all()
    for index in range(8):
        for text in (
            env.template.render_text(np.asarray(first.observation[index])),
            env.thought.render_text(np.asarray(demo.thought[index])),
        ):
            assert text.lstrip() == text
            assert text.removesuffix("\n").rstrip() == text.removesuffix("\n")


@pytest.mark.parametrize("name", ["bandit", "frozen_lake", "sokoban"])
def test_rules_are_short_and_name_every_action(name):
    env = envs_jax.make(name)
    assert len(env.rules.split()) <= 60
    if name != "bandit":  # its names are in the observation
        assert all(action in env.rules for action in env.actions)
