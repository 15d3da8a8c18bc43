"""Evaluation: fixed levels, one episode each, and the best that anyone could do on them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.train.program import Program, as_temperature, level_keys
from ragen_jax.types import Trajectory


def evaluate(program: Program, params: nnx.State) -> tuple[dict[str, float], Trajectory]:
    """Play `eval.levels` levels at `eval.temperature`, always the same ones with the same draws.

    Returns metrics under `eval/<env>/...` and the trajectory. Success is the environment's own word;
    format validity is the share of turns whose reply was in the format with known actions only.
    """
    config = program.config.eval
    trajectory = program.engine(
        params,
        level_keys(config.seed, config.levels),
        jax.random.key(config.seed),
        as_temperature(config.temperature),
        group_size=1,
    )
    turns = trajectory.turn_played
    numbers = {
        "success": jnp.mean(trajectory.success),
        "reward": jnp.mean(jnp.sum(trajectory.turn_rewards, axis=1)),
        "format_valid": jnp.sum(trajectory.format_valid & turns) / jnp.sum(turns),
        "turns": jnp.mean(jnp.sum(turns, axis=1)),
        "actions": jnp.mean(jnp.sum(trajectory.actions >= 0, axis=(1, 2))),
    }
    prefix = f"eval/{program.env.name}/"
    return {prefix + name: float(value) for name, value in jax.device_get(numbers).items()}, trajectory


def ceiling(program: Program) -> float:
    """Mean success of optimal play on the evaluation levels within the episode's actions."""
    config, settings = program.config.eval, program.settings
    actions = min(settings.max_actions, settings.max_turns * settings.max_actions_per_turn)
    states, _ = jax.vmap(program.env.reset)(level_keys(config.seed, config.levels))
    return float(np.mean(jax.vmap(lambda s: program.env.optimal_success(s, actions))(states)))


def standard_error(success: float, count: int) -> float:
    """Standard error of a success rate over `count` episodes."""
    return float(np.sqrt(success * (1 - success) / count))


def summary_line(label: str, metrics: dict[str, Any], name: str, count: int) -> str:
    """One line for people: success with its standard error, and format validity apart from it."""
    success = metrics[f"eval/{name}/success"]
    error = standard_error(success, count)
    valid = metrics[f"eval/{name}/format_valid"]
    return f"{label:<28} success {100 * success:5.1f}% ± {100 * error:.1f}   format valid {100 * valid:5.1f}%"
