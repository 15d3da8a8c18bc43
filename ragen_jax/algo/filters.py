"""Which groups of episodes are worth a gradient step.

StarPO-S (arXiv 2504.20073) trains on the groups whose members disagree most: a prompt that always
succeeds or always fails teaches nothing. Members of a group are adjacent rows, all shapes are static,
and scores are taken on every episode of a group before any episode is dropped.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def group_deviations(returns: Float[Array, "b"], *, group_size: int) -> Float[Array, "g k"]:
    """Distance of each return from its group's mean, `R_{g,i} - mean_j R_{g,j}`.

    The group's first return is subtracted before the mean is taken, so that a group of equal returns has
    deviations of exactly zero. Without this the rounding of the mean, divided by an equally small
    standard deviation, becomes an advantage.
    """
    chex.assert_rank(returns, 1)
    if group_size < 1 or returns.shape[0] % group_size:
        raise ValueError(f"{returns.shape[0]} episodes do not divide into groups of {group_size}")
    grouped = returns.astype(jnp.float32).reshape(-1, group_size)
    shifted = grouped - grouped[:, :1]
    return shifted - shifted.mean(axis=1, keepdims=True)


def group_std(returns: Float[Array, "b"], *, group_size: int) -> Float[Array, "g"]:
    """Standard deviation of the returns inside each group, with Bessel's correction.

        s_g = sqrt(sum_i (R_{g,i} - mean_g)^2 / (group_size - 1))

    Exactly zero for a group of equal returns.
    """
    if group_size < 2:
        raise ValueError(f"the standard deviation in a group needs group_size >= 2, got {group_size}")
    deviations = group_deviations(returns, group_size=group_size)
    return jnp.sqrt(jnp.sum(deviations**2, axis=1) / (group_size - 1))


def keep_top_groups(scores: Float[Array, "g"], *, count: int) -> Int[Array, "count"]:
    """Indices of the `count` highest scores, best first; of equal scores the lower index comes first.

    NaN ranks below every number.
    """
    chex.assert_rank(scores, 1)
    if not 1 <= count <= scores.shape[0]:
        raise ValueError(f"cannot keep {count} of {scores.shape[0]} groups")
    return jnp.argsort(-scores, stable=True)[:count]


def member_rows(groups: Int[Array, "count"], *, group_size: int) -> Int[Array, "rows"]:
    """Rows of the episodes of `groups`: `g * group_size + i` for every kept group and member, in order."""
    chex.assert_rank(groups, 1)
    return (groups[:, None] * group_size + jnp.arange(group_size)[None, :]).reshape(-1)
