"""Numbers that tell early whether training is healthy."""

from __future__ import annotations

import chex
from jaxtyping import Array, Bool, Float

from ragen_jax.algo.filters import group_std


def group_summary(
    returns: Float[Array, "b"], success: Bool[Array, "b"], *, group_size: int
) -> dict[str, Float[Array, ""]]:
    """Scalars of a batch of episodes, members of a group adjacent.

    `reward/in_group_std` is the mean over groups of the standard deviation inside a group (the first
    number to fall before a collapse, arXiv 2504.20073); groups of one have none and the key is left out.
    `pass_at_k` is the share of groups in which any member succeeded, so k is `group_size`.
    """
    chex.assert_rank([returns, success], 1)
    chex.assert_equal_shape([returns, success])
    chex.assert_type(success, bool)
    if group_size < 1 or returns.shape[0] % group_size:
        raise ValueError(f"{returns.shape[0]} episodes do not divide into groups of {group_size}")
    summary = {
        "reward/mean": returns.mean(),
        "success": success.mean(),
        "pass_at_k": success.reshape(-1, group_size).any(axis=1).mean(),
    }
    if group_size > 1:
        summary["reward/in_group_std"] = group_std(returns, group_size=group_size).mean()
    return summary
