"""A two-armed bandit whose arms have names: one turn, one action.

Rules: arXiv 2504.20073 (the low arm's payout is 0.1 in its code and 0.15 in its text). Members of a group
see the same two names in the same order and draw their own payouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from jumanji.types import TimeStep

from envs_jax.base import Demonstration, TextEnv
from envs_jax.common import first_step, next_step
from envs_jax.text import Slot, Template

# (low, high) names of arXiv 2604.06268.
TRAIN_PAIRS = (
    ("Teacher", "Trader"),
    ("Nurse", "StartupFounder"),
    ("Librarian", "Investor"),
    ("Accountant", "StockBroker"),
    ("Engineer", "RealEstateAgent"),
    ("Pharmacist", "Musician"),
    ("Clerk", "Freelancer"),
    ("Technician", "Youtuber"),
    ("Planner", "Artist"),
    ("Postman", "Pilot"),
    ("Banker", "VentureCapitalist"),
    ("Gardener", "Cryptominer"),
)
TEST_PAIRS = (
    ("Receptionist", "Explorer"),
    ("Archivist", "Filmmaker"),
    ("Bookkeeper", "Consultant"),
    ("SocialWorker", "Photographer"),
    ("Mechanic", "GameDesigner"),
    ("Secretary", "Entrepreneur"),
    ("Cashier", "DataScientist"),
    ("CivilServant", "StartupAccelerator"),
)


class BanditState(NamedTuple):
    """Arms are indices into the environment's `actions`."""

    key: chex.PRNGKey
    shown: Int[Array, "2"]  # the arms in the order in which they are displayed
    chosen: Int[Array, ""]  # -1 until an arm is chosen


class Bandit(TextEnv[BanditState]):
    """The low arm pays `low_reward` always, the high arm `high_reward` with probability `high_prob`, else 0.

    `pairs` gives several (low, high) names to draw a level's names from, in place of `low` and `high`.
    `actions` holds the names of every pair, low before high; those not shown are not valid.
    """

    name: ClassVar[str] = "bandit"

    def __init__(
        self,
        low: str = "Phoenix",
        high: str = "Dragon",
        *,
        pairs: Sequence[Sequence[str]] | None = None,
        low_reward: float = 0.1,
        high_reward: float = 1.0,
        high_prob: float = 0.25,
    ):
        pairs = tuple((low_name, high_name) for low_name, high_name in (pairs or [(low, high)]))
        arms = tuple(arm for pair in pairs for arm in pair)
        if len({arm.casefold() for arm in arms}) != len(arms):
            raise ValueError(f"arm names must differ, without regard to case: {', '.join(arms)}")
        if any(not arm or arm != arm.strip() for arm in arms):
            raise ValueError(f"an arm's name must not be empty or begin or end with whitespace: {arms}")
        if not 0.0 <= high_prob <= 1.0:
            raise ValueError(f"high_prob must lie in 0..1, got {high_prob}")
        for field, value in (("low_reward", low_reward), ("high_reward", high_reward)):
            if abs(10 * value - round(10 * value)) > 1e-6:  # rewards are shown with one decimal
                raise ValueError(f"{field} must be a multiple of 0.1, got {value}")
        self.actions = arms
        self.low_reward, self.high_reward, self.high_prob = low_reward, high_reward, high_prob
        payouts = (0.0, low_reward, high_reward)
        self.reward_range = (min(payouts), max(payouts))
        self.rules = (
            "You face two arms. One pays a small sum every time. The other pays a large sum now and then, "
            "else nothing, and more on average. Their names hint at which is which. "
            "Choose one arm by its name, once. Your reward is what it pays."
        )
        names = tuple(" " + arm for arm in arms)
        first, second, choice = Slot("first", names), Slot("second", names), Slot("choice", names)
        self.template = Template.of("Arms:", first, " or", second, "\n")
        self.thought = Template.of("The choice is", first, " or", second, ". I try", choice, ".")
        super().__init__()

    def reset(self, key: chex.PRNGKey) -> tuple[BanditState, TimeStep]:
        """Draw the pair of names and the order in which they are displayed."""
        level_key, dynamics_key = jax.random.split(key)
        pair_draw, order_draw = jax.random.uniform(level_key, (2,))
        pair = jnp.floor(pair_draw * (len(self.actions) // 2)).astype(jnp.int32)
        high_first = (order_draw < 0.5).astype(jnp.int32)
        shown = jnp.stack([2 * pair + high_first, 2 * pair + 1 - high_first]).astype(jnp.int32)
        state = BanditState(key=dynamics_key, shown=shown, chosen=jnp.int32(-1))
        return state, first_step(self.observe(state))

    def step(self, state: BanditState, action: Int[Array, ""]) -> tuple[BanditState, TimeStep]:
        """Draw the payout of the chosen arm from the state's key; the episode is over."""
        action = jnp.asarray(action, dtype=jnp.int32)
        fresh = state.chosen < 0
        pays = jax.random.bernoulli(state.key, self.high_prob)  # used once: there is no second action
        high_payout = jnp.where(pays, jnp.float32(self.high_reward), 0.0)
        reward: Float[Array, ""] = jnp.where(is_high(action), high_payout, jnp.float32(self.low_reward))
        state = state._replace(chosen=jnp.where(fresh, action, state.chosen))
        done = jnp.ones((), dtype=bool)
        reward = jnp.where(fresh, reward, 0.0)
        return state, next_step(reward, self.observe(state), done, self.success(state))

    def observe(self, state: BanditState) -> Int[Array, "s"]:
        """The two names in displayed order."""
        return state.shown

    def describe(self, state: BanditState) -> str:
        """The displayed names, and the choice once it is made."""
        text = self.template.render_text([int(arm) for arm in np.asarray(state.shown)])
        chosen = int(state.chosen)
        return text.rstrip("\n") + (f" (chose {self.actions[chosen]})" if chosen >= 0 else "")

    def success(self, state: BanditState) -> Bool[Array, ""]:
        """Whether the high arm was chosen, whatever it paid."""
        return (state.chosen >= 0) & is_high(state.chosen)

    def optimal_success(self, state: BanditState, num_actions: int) -> Float[Array, ""]:
        """1 before the choice; afterwards, whether it was the high arm."""
        return (self.success(state) | ((state.chosen < 0) & (num_actions > 0))).astype(jnp.float32)

    def valid_actions(self, state: BanditState) -> Bool[Array, "n"]:
        """Only the two names on display."""
        arms = jnp.arange(len(self.actions))
        return jnp.any(arms[:, None] == state.shown[None, :], axis=1)

    def demonstrate(self, state: BanditState, key: chex.PRNGKey, max_actions: int) -> Demonstration:
        """Either arm with equal chance: a demonstration teaches the format and not the answer."""
        choice = state.shown[jax.random.bernoulli(key).astype(jnp.int32)]
        actions = jnp.full((max_actions,), -1, dtype=jnp.int32).at[0].set(choice)
        return Demonstration(actions, jnp.append(state.shown, choice).astype(jnp.int32))


def is_high(arm: Int[Array, ""]) -> Bool[Array, ""]:
    """In `actions` every pair lists its low arm first."""
    return arm % 2 == 1
