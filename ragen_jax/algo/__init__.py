"""Advantages, losses, filters, reward placement and diagnostics: arrays in, arrays out."""

from ragen_jax.algo.advantages import gae, grpo, whiten
from ragen_jax.algo.diagnostics import group_summary
from ragen_jax.algo.filters import group_deviations, group_std, keep_top_groups, member_rows
from ragen_jax.algo.head import gather_loss_positions, scatter_positions, token_logprobs
from ragen_jax.algo.losses import kl_estimate, policy_loss, token_weights, value_loss, weighted_sum
from ragen_jax.algo.rewards import pack_columns, place_rewards

__all__ = [
    "gae",
    "gather_loss_positions",
    "group_deviations",
    "group_std",
    "group_summary",
    "grpo",
    "keep_top_groups",
    "kl_estimate",
    "member_rows",
    "pack_columns",
    "place_rewards",
    "policy_loss",
    "scatter_positions",
    "token_logprobs",
    "token_weights",
    "value_loss",
    "weighted_sum",
    "whiten",
]
