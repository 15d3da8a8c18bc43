"""The arrays that pass between layers, with their shapes.

Axes: B episodes (groups x group_size, members of a group adjacent), S columns of the token buffers,
T turns, A actions a turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Trajectory(NamedTuple):
    """A batch of finished episodes exactly as they were generated.

    The `[B, S]` buffers are indexed by cache column: all rows share columns, observations are padded on
    the left inside their block, and `valid` says which columns hold a token of the row.
    """

    tokens: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    loss_mask: Bool[Array, "b s"]  # tokens that the policy sampled (or a demonstration wrote)
    behaviour_logprobs: Float[Array, "b s"]  # log-probability under the sampled distribution; 0 off the mask
    turn_ids: Int[Array, "b s"]  # turn of a column; -1 in the system prompt and in padding
    turn_ends: Bool[Array, "b s"]  # the last sampled token of each turn
    turn_rewards: Float[Array, "b t"]  # environment reward plus format penalty, summed over the turn
    env_rewards: Float[Array, "b t"]  # environment reward alone
    turn_played: Bool[Array, "b t"]
    format_valid: Bool[Array, "b t"]  # reply in the format, at least one action, no unknown one
    actions: Int[Array, "b t a"]  # executed actions, -1 elsewhere
    success: Bool[Array, "b"]
    states: Any  # environment states, leaves [T + 1, B, ...]: before each turn and at the end


class Batch(NamedTuple):
    """Episodes packed for learning: tokens of a row are contiguous from column 0.

    Everything at column t speaks of the token at t: its log-probability is read off the hidden state of
    column t - 1.
    """

    tokens: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    loss_mask: Bool[Array, "b s"]
    behaviour_logprobs: Float[Array, "b s"]
    rewards: Float[Array, "b s"]  # turn rewards on the last sampled token of their turn
    returns: Float[Array, "b"]  # sum of an episode's turn rewards
