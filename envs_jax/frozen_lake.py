"""FrozenLake with a random map for every episode.

Rules: arXiv 2504.20073 and gymnasium's `FrozenLakeEnv`. A cell is ice or a hole, the start and the goal are
random and distinct, and the whole map is drawn again until a path joins them. On slippery ice a move goes
as intended with probability `success_rate` and to either side with half of the rest. Cells are numbered
row by row; actions are Left, Down, Right, Up, so the two sides of action `a` are `a - 1` and `a + 1` mod 4.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from jumanji.types import TimeStep

from envs_jax.base import Demonstration, TextEnv
from envs_jax.common import DIRECTION_WORDS, direction_index, first_step, next_step
from envs_jax.rows import RowVocabulary
from envs_jax.text import Slot, Template

ACTIONS = ("Left", "Down", "Right", "Up")
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (row, column) of each action
SYMBOLS = "P_OG"  # player, ice, hole, goal
DISCOUNT = 0.95  # the expert's: prefers the shorter of two equally safe ways
SWEEPS = 64  # of its value iteration; exact after cells - 1 sweeps where moves are certain


class FrozenLakeState(NamedTuple):
    """`key` drives the slips only; the map came from another stream."""

    key: chex.PRNGKey
    holes: Bool[Array, "cells"]
    goal: Int[Array, ""]
    player: Int[Array, ""]


def neighbours(size: int) -> np.ndarray:
    """Int[cells, 4]: where each direction leads; a move off the grid stays."""
    rows, columns = np.divmod(np.arange(size * size), size)
    moved = [np.clip(rows + dr, 0, size - 1) * size + np.clip(columns + dc, 0, size - 1) for dr, dc in STEPS]
    return np.stack(moved, axis=1).astype(np.int32)


def slip_probabilities(success_rate: float) -> np.ndarray:
    """Float64[4, 4]: the chance that an intended direction (first index) becomes an actual one."""
    side = (1.0 - success_rate) / 2.0
    eye = np.eye(4)
    return success_rate * eye + side * (np.roll(eye, 1, axis=1) + np.roll(eye, -1, axis=1))


def transition_table(
    holes: Bool[Array, "cells"], goal: Int[Array, ""], *, size: int, success_rate: float
) -> Float[Array, "cells 4 cells"]:
    """P[cell, action, next cell]; holes and the goal keep the player for ever."""
    cells = size * size
    arrival = jnp.asarray(np.eye(cells, dtype=np.float32)[neighbours(size)])  # [cells, actual, next]
    slip = jnp.asarray(slip_probabilities(success_rate), dtype=jnp.float32)
    moving = jnp.einsum("ab,cbn->can", slip, arrival, precision="highest")
    absorbed = holes | (jnp.arange(cells) == goal)
    staying = jnp.broadcast_to(jnp.eye(cells)[:, None, :], moving.shape)
    return jnp.where(absorbed[:, None, None], staying, moving)


def action_values(
    values: Float[Array, "cells"], *, size: int, success_rate: float
) -> Float[Array, "cells 4"]:
    """Expected value of the cell that each action leads to."""
    ahead = values[neighbours(size)]
    side = (1.0 - success_rate) / 2.0
    return success_rate * ahead + side * (jnp.roll(ahead, 1, axis=1) + jnp.roll(ahead, -1, axis=1))


def plan(
    holes: Bool[Array, "cells"],
    goal: Int[Array, ""],
    *,
    sweeps: int,
    size: int,
    success_rate: float,
    discount: float = 1.0,
) -> Float[Array, "cells"]:
    """Value of every cell under best play of `sweeps` more actions, by dynamic programming.

    V_0 = [cell is goal]; V_n(s) = discount * max_a E[V_{n-1}(s')], holes 0 and goal 1 throughout. Without
    discount this is the greatest probability of reaching the goal within `sweeps` actions.
    """
    at_goal = jnp.arange(size * size) == goal
    start = at_goal.astype(jnp.float32)

    def sweep(_: int, values: Float[Array, "cells"]) -> Float[Array, "cells"]:
        best = discount * action_values(values, size=size, success_rate=success_rate).max(axis=1)
        return jnp.where(at_goal, 1.0, jnp.where(holes, 0.0, best))

    return jax.lax.fori_loop(0, sweeps, sweep, start)


def reachable(
    holes: Bool[Array, "cells"], start: Int[Array, ""], goal: Int[Array, ""], *, size: int
) -> Bool[Array, ""]:
    """Whether a path over ice joins start and goal (moves are symmetric, so spread from the start)."""
    around = neighbours(size)

    def spread(_: int, reached: Bool[Array, "cells"]) -> Bool[Array, "cells"]:
        return (reached | jnp.any(reached[around], axis=1)) & ~holes

    reached = jax.lax.fori_loop(0, size * size - 1, spread, jnp.arange(size * size) == start)
    return reached[goal]


def draw_level(
    key: chex.PRNGKey, *, size: int, frozen_prob: float
) -> tuple[Bool[Array, "cells"], Int[Array, ""], Int[Array, ""]]:
    """Holes, start and goal of a level with a path; a map without one is thrown away as a whole."""
    cells = size * size

    def draw(carry: tuple) -> tuple:
        next_key, draw_key = jax.random.split(carry[0])
        ice_draws, place_draws = jax.random.uniform(draw_key, (2, cells))
        # Two different cells, uniformly: those of the greatest of independent draws.
        _, (start, goal) = jax.lax.top_k(place_draws, 2)
        places, frozen = jnp.arange(cells), ice_draws < frozen_prob
        holes = ~(frozen | (places == start) | (places == goal))
        return next_key, holes, start, goal, reachable(holes, start, goal, size=size)

    _, holes, start, goal, _ = jax.lax.while_loop(
        lambda carry: ~carry[4],
        draw,
        (key, jnp.zeros(cells, dtype=bool), jnp.int32(0), jnp.int32(0), jnp.zeros((), dtype=bool)),
    )
    return holes, start, goal


class FrozenLake(TextEnv[FrozenLakeState]):
    """Reward 1 on the goal, else 0; the episode ends on the goal or in a hole. See the module's head."""

    name: ClassVar[str] = "frozen_lake"
    reward_range = (0.0, 1.0)
    actions = ACTIONS

    def __init__(self, size: int = 4, frozen_prob: float = 0.8, success_rate: float = 1.0 / 3.0):
        if not 2 <= size <= 8:  # a row is one slot: its vocabulary grows as 2 ** size
            raise ValueError(f"size must lie in 2..8, got {size}")
        if not 0.0 < frozen_prob <= 1.0:
            raise ValueError(f"frozen_prob must lie in (0, 1], got {frozen_prob}")
        if not 0.0 <= success_rate <= 1.0:
            raise ValueError(f"success_rate must lie in 0..1, got {success_rate}")
        self.size, self.frozen_prob, self.success_rate = size, frozen_prob, success_rate
        slippery = "The ice is slippery: a move may slide to either side. " if success_rate < 1.0 else ""
        self.rules = (
            "Walk over the frozen lake to the goal. "
            "Symbols: P you, _ ice, O hole, G goal. "
            "Actions: Left, Down, Right, Up. A move off the grid stays. "
            f"{slippery}Reaching G gives reward 1. Falling into a hole ends the game with 0."
        )
        self._rows = RowVocabulary(SYMBOLS, size, {"P": 1, "G": 1})
        self.template = Template.of(*(self._rows.slot(f"row{i}") for i in range(size)))
        self.thought = Template.of("goal", Slot("direction", DIRECTION_WORDS))
        super().__init__()

    def reset(self, key: chex.PRNGKey) -> tuple[FrozenLakeState, TimeStep]:
        """Draw a level."""
        level_key, slip_key = jax.random.split(key)
        holes, start, goal = draw_level(level_key, size=self.size, frozen_prob=self.frozen_prob)
        state = FrozenLakeState(key=slip_key, holes=holes, goal=goal, player=start)
        return state, first_step(self.observe(state))

    def step(self, state: FrozenLakeState, action: Int[Array, ""]) -> tuple[FrozenLakeState, TimeStep]:
        """Slip, then move."""
        next_key, slip_key = jax.random.split(state.key)
        over = self._done(state)
        draw = jax.random.uniform(slip_key)  # in [0, 1): never slips where success_rate is 1
        to_left = draw < self.success_rate + (1.0 - self.success_rate) / 2.0
        turn = jnp.where(draw < self.success_rate, 0, jnp.where(to_left, -1, 1))
        moved = jnp.asarray(neighbours(self.size))[state.player, (action + turn) % 4]
        state = state._replace(key=next_key, player=jnp.where(over, state.player, moved))
        success = self.success(state)
        reward = jnp.where(success & ~over, jnp.float32(1.0), 0.0)
        return state, next_step(reward, self.observe(state), self._done(state), success)

    def observe(self, state: FrozenLakeState) -> Int[Array, "s"]:
        """One index a row."""
        places = jnp.arange(self.size * self.size)
        cells = jnp.where(state.holes, SYMBOLS.index("O"), SYMBOLS.index("_"))
        cells = jnp.where(places == state.goal, SYMBOLS.index("G"), cells)
        cells = jnp.where(places == state.player, SYMBOLS.index("P"), cells)
        return self._rows.index(cells.reshape(self.size, self.size))

    def describe(self, state: FrozenLakeState) -> str:
        """The board; a player in a hole is X, on the goal √."""
        cells = np.where(np.asarray(state.holes), "O", "_")
        cells[int(state.goal)] = "G"
        player = int(state.player)
        cells[player] = {"O": "X", "G": "√", "_": "P"}[str(cells[player])]
        return "\n".join("".join(row) for row in cells.reshape(self.size, self.size))

    def success(self, state: FrozenLakeState) -> Bool[Array, ""]:
        """Whether the player stands on the goal."""
        return state.player == state.goal

    def _done(self, state: FrozenLakeState) -> Bool[Array, ""]:
        return self.success(state) | state.holes[state.player]

    def optimal_success(self, state: FrozenLakeState, num_actions: int) -> Float[Array, ""]:
        """The greatest probability of reaching the goal within `num_actions` (static) more actions."""
        values = plan(
            state.holes, state.goal, sweeps=num_actions, size=self.size, success_rate=self.success_rate
        )
        return values[state.player]

    def demonstrate(self, state: FrozenLakeState, key: chex.PRNGKey, max_actions: int) -> Demonstration:
        """The optimal policy along intended outcomes, up to the goal; without slips the shortest path."""
        del key
        values = plan(
            state.holes,
            state.goal,
            sweeps=max(SWEEPS, self.size * self.size),
            size=self.size,
            success_rate=self.success_rate,
            discount=DISCOUNT,
        )
        policy = action_values(values, size=self.size, success_rate=self.success_rate).argmax(axis=1)
        policy = policy.astype(jnp.int32)
        around = jnp.asarray(neighbours(self.size))

        def act(player: Int[Array, ""], _: None) -> tuple[Int[Array, ""], Int[Array, ""]]:
            over = (player == state.goal) | state.holes[player]
            action = policy[player]
            return jnp.where(over, player, around[player, action]), jnp.where(over, -1, action)

        _, actions = jax.lax.scan(act, state.player, None, length=max_actions)
        rows = state.goal // self.size - state.player // self.size
        columns = state.goal % self.size - state.player % self.size
        return Demonstration(actions, direction_index(rows, columns)[None])
