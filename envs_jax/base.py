"""What every world is: a `jumanji.Environment` plus a text face."""

from __future__ import annotations

import abc
import functools
from typing import ClassVar, Generic, NamedTuple, TypeVar

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from jumanji import Environment, specs

from envs_jax.text import Template

State = TypeVar("State")


class Demonstration(NamedTuple):
    """What a scripted expert would do in one turn."""

    actions: Int[Array, "a"]  # action indices, -1 behind the last one
    thought: Int[Array, "u"]  # slot indices of the environment's `thought` template


class TextEnv(Environment, Generic[State]):
    """A world an agent reads and writes as text. Nothing on the instance changes after construction.

    The state is a pytree with a field `key`: the stream that later dynamics draw from. The engine gives
    every member of a group the same initial state and a key of its own. `step` on a finished episode is
    never observed (the engine masks it), and episodes are never reset in place.
    """

    name: ClassVar[str]
    rules: str  # system message: the world, its symbols, the goal, the rewards; in plain words
    template: Template  # the observation
    thought: Template  # the expert's thought before it acts
    actions: tuple[str, ...]  # action names in the order of their indices; matched without case
    reward_range: tuple[float, float]  # least and greatest reward of one action, in multiples of 0.1

    @abc.abstractmethod
    def observe(self, state: State) -> Int[Array, "s"]:
        """Slot indices (int32) of `template` for a state whose episode has not ended."""

    @abc.abstractmethod
    def describe(self, state: State) -> str:
        """Host-side text of any state, terminal ones included, for a person to look at."""

    @abc.abstractmethod
    def success(self, state: State) -> Bool[Array, ""]:
        """Whether the episode has ended in success."""

    @abc.abstractmethod
    def optimal_success(self, state: State, num_actions: int) -> Float[Array, ""]:
        """The probability that best play succeeds within `num_actions` (static) more actions."""

    @abc.abstractmethod
    def demonstrate(self, state: State, key: chex.PRNGKey, max_actions: int) -> Demonstration:
        """Up to `max_actions` actions (a static number) of the scripted expert, and its thought."""

    def valid_actions(self, state: State) -> Bool[Array, "n"]:
        """Which of `actions` exist in this state; others count as unknown words. All, by default."""
        del state
        return jnp.ones(len(self.actions), dtype=bool)

    @functools.cached_property
    def action_spec(self) -> specs.DiscreteArray:
        """One index into `actions`."""
        return specs.DiscreteArray(len(self.actions), name="action")

    @functools.cached_property
    def observation_spec(self) -> specs.BoundedArray:
        """One index for each slot of `template`."""
        sizes = jnp.array([len(slot.values) for slot in self.template.slots], dtype=jnp.int32)
        return specs.BoundedArray(
            shape=sizes.shape, dtype=jnp.int32, minimum=0, maximum=sizes - 1, name="slots"
        )
