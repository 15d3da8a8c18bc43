"""Worlds in pure JAX: rules plus a text face. Never imports ragen_jax."""

from envs_jax.bandit import Bandit
from envs_jax.base import Demonstration, TextEnv
from envs_jax.frozen_lake import FrozenLake
from envs_jax.registry import make, names
from envs_jax.sokoban import Sokoban
from envs_jax.text import Literal, Slot, Template

__all__ = [
    "Bandit",
    "Demonstration",
    "FrozenLake",
    "Literal",
    "Slot",
    "Sokoban",
    "Template",
    "TextEnv",
    "make",
    "names",
]
