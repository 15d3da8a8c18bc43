"""What the worlds share: time steps, words for a direction."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from jumanji.types import TimeStep, restart, termination, transition

# Indexed by 3 * (sign(rows) + 1) + sign(columns) + 1; the leading space belongs to the slot.
DIRECTION_WORDS = (
    " up left",
    " up",
    " up right",
    " left",
    " here",
    " right",
    " down left",
    " down",
    " down right",
)


def direction_index(rows: Int[Array, ""], columns: Int[Array, ""]) -> Int[Array, ""]:
    """Index into `DIRECTION_WORDS` of a displacement; rows grow downwards, columns to the right."""
    return (3 * (jnp.sign(rows) + 1) + jnp.sign(columns) + 1).astype(jnp.int32)


def first_step(observation: Any) -> TimeStep:
    """The time step of a reset; `extras` has the keys of every later one."""
    return restart(observation, extras={"success": jnp.zeros((), dtype=bool)})


def next_step(
    reward: Float[Array, ""], observation: Any, done: Bool[Array, ""], success: Bool[Array, ""]
) -> TimeStep:
    """A transition, or a termination where `done`."""
    reward = reward.astype(jnp.float32)
    extras = {"success": success}
    ended = termination(reward, observation, extras=extras)
    going = transition(reward, observation, extras=extras)
    return jax.tree.map(lambda end, go: jnp.where(done, end, go), ended, going)
