"""The worlds of a batch of episodes: their start, and the actions of a turn."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from envs_jax import TextEnv


class Played(NamedTuple):
    """The worlds of a batch of episodes."""

    states: Any  # leaves [b, ...]
    done: Bool[Array, "b"]
    spent: Int[Array, "b"]  # actions executed


def play_actions(
    env: TextEnv, worlds: Played, actions: Int[Array, "b a"], alive: Bool[Array, "b"], max_actions: int
) -> tuple[Played, Float[Array, "b"], Int[Array, "b a"]]:
    """Execute a turn's actions in order until the episode ends or its actions are spent.

    Returns the worlds, each row's summed reward (float32) and the actions executed, -1 elsewhere.
    """

    def one(carry, action):
        worlds, reward = carry
        act = alive & ~worlds.done & (action >= 0) & (worlds.spent < max_actions)
        stepped, timestep = jax.vmap(env.step)(worlds.states, jnp.maximum(action, 0))
        worlds = Played(
            states=_select(act, stepped, worlds.states),
            done=worlds.done | (act & timestep.last()),
            spent=worlds.spent + act,
        )
        return (worlds, reward + jnp.where(act, timestep.reward, 0.0)), jnp.where(act, action, -1)

    zero = jnp.zeros(actions.shape[0], jnp.float32)
    (worlds, reward), executed = jax.lax.scan(one, (worlds, zero), actions.T)
    return worlds, reward, executed.T


def _select(rows: Bool[Array, "b"], new: Any, old: Any) -> Any:
    """Leaves of `new` where `rows`, of `old` elsewhere; also for typed key arrays."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(rows.reshape(rows.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)


def reset_groups(
    env: TextEnv, level_keys: chex.PRNGKey, member_keys: chex.PRNGKey, group_size: int
) -> tuple[Any, Any]:
    """Initial states of the groups `[g, ...]` and of their members `[g * group_size, ...]`.

    Members share the level; what happens in it later is drawn from each member's own key.
    """
    groups, _ = jax.vmap(env.reset)(level_keys)
    members = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), groups)
    return groups, members._replace(key=member_keys)
