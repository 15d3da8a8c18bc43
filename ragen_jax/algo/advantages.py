"""Advantage estimators. Time runs over columns; a token is a step only where `mask` is set.

Estimators return raw advantages, exactly zero off the mask; whitening is a separate function. Nothing
here is differentiated: callers pass values that need no gradient.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ragen_jax.algo.filters import group_deviations, group_std


def gae(
    rewards: Float[Array, "b t"],
    values: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Generalised advantage estimation over sampled tokens (Schulman et al., arXiv 1506.02438).

        delta_t = r_t + gamma * v_{t'} - v_t
        A_t     = delta_t + gamma * lam * A_{t'}
        return_t = A_t + v_t

    Departure from the paper: t' is the next *sampled* token, not t + 1. Observation tokens between two
    turns are skipped; they are not steps with zero reward, so they neither discount nor bootstrap. After
    the last sampled token the value is zero (episodes end). Rewards and values off the mask are ignored.

    Returns:
      advantages and returns `[b, t]`, both zero off the mask.
    """
    chex.assert_rank([rewards, values, mask], 2)
    chex.assert_equal_shape([rewards, values, mask])
    chex.assert_type(mask, bool)
    rewards, values = rewards.astype(jnp.float32), values.astype(jnp.float32)

    def step(carry, column):
        advantage_next, value_next = carry
        reward, value, on = column
        delta = reward + gamma * value_next - value
        advantage = delta + gamma * lam * advantage_next
        carry = (jnp.where(on, advantage, advantage_next), jnp.where(on, value, value_next))
        return carry, jnp.where(on, advantage, 0.0)

    end = jnp.zeros_like(rewards[:, 0])
    _, advantages = jax.lax.scan(step, (end, end), (rewards.T, values.T, mask.T), reverse=True)
    advantages = advantages.T
    return advantages, jnp.where(mask, advantages + values, 0.0)


def grpo(
    returns: Float[Array, "b"],
    mask: Bool[Array, "b t"],
    *,
    group_size: int,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> Float[Array, "b t"]:
    """Group-relative advantages (Shao et al., arXiv 2402.03300), one number for a whole trajectory.

        A_{g,i,t} = (R_{g,i} - mean_g) / (std_g + epsilon)      on the mask

    with the standard deviation of Bessel's correction. `normalize_std=False` leaves the division out, as
    Dr. GRPO does (Liu et al., arXiv 2503.20783). Departure from the paper: R is the return of an episode
    of several turns, and all sampled tokens of all turns share it. A group of equal returns has advantages
    of exactly zero.
    """
    chex.assert_rank([returns, mask], [1, 2])
    chex.assert_equal(returns.shape[0], mask.shape[0])
    chex.assert_type(mask, bool)
    if group_size < 2:
        raise ValueError(f"group-relative advantages need group_size >= 2, got {group_size}")
    advantages = group_deviations(returns, group_size=group_size)
    if normalize_std:
        advantages = advantages / (group_std(returns, group_size=group_size)[:, None] + epsilon)
    return jnp.where(mask, advantages.reshape(-1, 1), 0.0)


def whiten(
    advantages: Float[Array, "b t"], mask: Bool[Array, "b t"], *, epsilon: float = 1e-8
) -> Float[Array, "b t"]:
    """Shift and scale to mean zero and variance one over the mask; zero off it.

        (A - mean) / sqrt(var + epsilon)

    with Bessel's correction in the variance. The statistics are those of the array given: whiten a batch
    before it is cut into minibatches.
    """
    chex.assert_rank([advantages, mask], 2)
    chex.assert_equal_shape([advantages, mask])
    chex.assert_type(mask, bool)
    count = mask.sum()
    mean = jnp.where(mask, advantages, 0.0).sum() / jnp.maximum(count, 1)
    centred = jnp.where(mask, advantages - mean, 0.0)
    variance = jnp.sum(centred**2) / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + epsilon)
