"""From the columns of a rollout to the columns of a learning batch."""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def place_rewards(
    turn_rewards: Float[Array, "b n"], turn_ends: Bool[Array, "b s"], turn_ids: Int[Array, "b s"]
) -> Float[Array, "b s"]:
    """Token-level rewards: the reward of turn k on the last sampled token of turn k, zero elsewhere.

        r_{b,t} = R_{b, turn_ids[b,t]}  if turn_ends[b,t],  else 0

    Ends are the recorded ones: an end found by looking for a non-zero reward is lost when a turn's reward
    is zero. The reward of a turn without an end (one never played) is placed nowhere.
    """
    chex.assert_rank([turn_rewards, turn_ends, turn_ids], 2)
    chex.assert_equal_shape([turn_ends, turn_ids])
    chex.assert_equal(turn_rewards.shape[0], turn_ids.shape[0])
    chex.assert_type([turn_ends, turn_ids], [bool, int])
    chosen = turn_ends & (turn_ids >= 0)
    return jnp.where(chosen, jnp.take_along_axis(turn_rewards, jnp.where(chosen, turn_ids, 0), axis=1), 0)


def pack_columns(
    valid: Bool[Array, "b s"], *arrays: Shaped[Array, "b s"]
) -> tuple[Shaped[Array, "b s"], ...]:
    """Move the valid columns of each row to its front, in their order; zero or False behind them.

    Returns `(valid, *arrays)`. Pads inside a row come from observations of unequal length that share
    columns during generation.
    """
    chex.assert_rank(valid, 2)
    chex.assert_type(valid, bool)
    chex.assert_equal_shape([valid, *arrays])
    order = jnp.argsort(~valid, axis=1, stable=True)
    packed = jnp.take_along_axis(valid, order, axis=1)
    return packed, *(
        jnp.where(packed, jnp.take_along_axis(array, order, axis=1), jnp.zeros((), array.dtype))
        for array in arrays
    )
