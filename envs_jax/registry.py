"""Environments by name."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from envs_jax.bandit import Bandit
from envs_jax.base import TextEnv
from envs_jax.frozen_lake import FrozenLake
from envs_jax.sokoban import Sokoban

REGISTRY: dict[str, type[TextEnv]] = {env.name: env for env in (Bandit, FrozenLake, Sokoban)}


def names() -> list[str]:
    """The names that `make` knows, sorted."""
    return sorted(REGISTRY)


def make(name: str, **kwargs: Any) -> TextEnv:
    """Build an environment. Raises ValueError for an unknown name or parameter, saying what is known."""
    if name not in REGISTRY:
        close = difflib.get_close_matches(name, names(), n=1, cutoff=0.0)
        raise ValueError(
            f"unknown environment {name!r}: did you mean {close[0]!r}? Known: {', '.join(names())}"
        )
    accepted = list(inspect.signature(REGISTRY[name]).parameters)
    for parameter in kwargs:
        if parameter not in accepted:
            raise ValueError(f"{name}: unknown parameter {parameter!r}; accepted: {', '.join(accepted)}")
    return REGISTRY[name](**kwargs)
