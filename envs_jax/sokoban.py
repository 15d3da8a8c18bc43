"""Sokoban: push every box onto a target.

Rules and rewards: gym-sokoban's, as in arXiv 2504.20073. A push needs a free cell behind the box; a move
into anything else stays. The step is general; drawing levels and solving them is for one box.
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

from envs_jax import sokoban_levels as levels
from envs_jax.base import Demonstration, TextEnv
from envs_jax.common import DIRECTION_WORDS, direction_index, first_step, next_step
from envs_jax.rows import RowVocabulary
from envs_jax.text import Slot, Template

ACTIONS = ("Up", "Down", "Left", "Right")
SYMBOLS = "#_OX√PS"  # wall, floor, target, box, box on target, player, player on target
# By solved or not, then by a box taken off a target, neither, put on one; a table, because sums round.
REWARDS = np.array([[-1.1, -0.1, 0.9], [8.9, 9.9, 10.9]], dtype=np.float32)


class SokobanState(NamedTuple):
    """The board with its border. `key` is carried for the interface; nothing here is random."""

    key: chex.PRNGKey
    walls: Bool[Array, "h w"]
    targets: Bool[Array, "h w"]
    boxes: Bool[Array, "h w"]
    player: Int[Array, "2"]  # row, column
    steps: Int[Array, ""]  # actions taken


class Sokoban(TextEnv[SokobanState]):
    """-0.1 an action, +1 for a box put on a target, -1 for one taken off, +10 when all are on.

    The episode ends when all boxes are on targets or after `max_steps` actions. `search_depth` bounds the
    level generator's search. `show_border` prints the wall around the room too.
    """

    name: ClassVar[str] = "sokoban"
    actions = ACTIONS
    reward_range = (-0.1, 10.9)  # a single box never leaves its target: the episode is over by then

    def __init__(
        self,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 300,
        max_steps: int = 100,
        *,
        show_border: bool = True,
    ):
        dim_room = tuple(dim_room)
        if len(dim_room) != 2 or not all(5 <= side <= 8 for side in dim_room):
            raise ValueError(f"dim_room must be two sides of 5..8 cells with the border, got {dim_room}")
        if num_boxes != 1:
            raise ValueError(f"num_boxes: levels are drawn for 1 box only, got {num_boxes}")
        if search_depth < 3:
            raise ValueError(f"search_depth must be at least 3 to pull the box at all, got {search_depth}")
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        self.dim_room, self.num_boxes, self.search_depth, self.max_steps = (
            dim_room,
            num_boxes,
            search_depth,
            max_steps,
        )
        self.show_border = show_border
        self._inner = {"height": dim_room[0] - 2, "width": dim_room[1] - 2}
        border = "" if show_border else "Beyond the grid is wall. "
        self.rules = (
            "Push the box onto the target. "
            "Symbols: # wall, _ floor, O target, X box, P you, S you on the target. "
            f"{border}Actions: Up, Down, Left, Right. You push a box by walking into it, if the cell behind "
            "it is free; you cannot pull. "
            "Rewards: -0.1 per action, +1 box on target, +10 solved."
        )
        side, top = ("#", "#" * dim_room[1] + "\n") if show_border else ("", "")
        # While the episode lasts no more boxes than all but one are on targets.
        limits = {"PS": 1, "X√": num_boxes, "O√S": num_boxes, "√": num_boxes - 1}
        self._rows = RowVocabulary(SYMBOLS, self._inner["width"], limits, prefix=side, suffix=side)
        rows = [self._rows.slot(f"row{i}") for i in range(self._inner["height"])]
        self.template = Template.of(top, *rows, top)
        deeds = tuple(f" {verb} {action.lower()}" for verb in ("walk", "push") for action in ACTIONS)
        self.thought = Template.of(
            "box must go", Slot("direction", DIRECTION_WORDS), ", so", Slot("deed", deeds)
        )
        super().__init__()

    def reset(self, key: chex.PRNGKey) -> tuple[SokobanState, TimeStep]:
        """Draw a solvable level."""
        level_key, state_key = jax.random.split(key)
        level = levels.draw_level(level_key, search_depth=self.search_depth, **self._inner)
        state = SokobanState(
            key=state_key,
            walls=~self._board(level.floor),
            targets=self._board(jnp.arange(level.floor.shape[0]) == level.target),
            boxes=self._board(jnp.arange(level.floor.shape[0]) == level.box),
            player=jnp.stack(jnp.divmod(level.player, self._inner["width"])).astype(jnp.int32) + 1,
            steps=jnp.int32(0),
        )
        return state, first_step(self.observe(state))

    def step(self, state: SokobanState, action: Int[Array, ""]) -> tuple[SokobanState, TimeStep]:
        """Push, else walk, else stay."""
        over = self.success(state) | (state.steps >= self.max_steps)
        step = jnp.asarray(levels.STEPS, dtype=jnp.int32)[action]
        ahead = state.player + step
        beyond = jnp.clip(ahead + step, 0, jnp.array(self.dim_room) - 1)  # past the border: push is off
        ahead_at, beyond_at = (ahead[0], ahead[1]), (beyond[0], beyond[1])
        blocked = state.walls | state.boxes
        push = ~over & state.boxes[ahead_at] & ~blocked[beyond_at]
        move = push | (~over & ~blocked[ahead_at])
        pushed = state.boxes.at[ahead_at].set(False).at[beyond_at].set(True)
        after = state._replace(
            boxes=jnp.where(push, pushed, state.boxes),
            player=jnp.where(move, ahead, state.player),
            steps=state.steps + jnp.where(over, 0, 1),
        )
        success = self.success(after)
        gained = jnp.sum(after.boxes & after.targets) - jnp.sum(state.boxes & state.targets)
        reward = jnp.asarray(REWARDS)[success.astype(jnp.int32), jnp.sign(gained) + 1]
        reward = jnp.where(over, 0.0, reward)
        done = success | (after.steps >= self.max_steps)
        return after, next_step(reward, self.observe(after), done, success)

    def observe(self, state: SokobanState) -> Int[Array, "s"]:
        """One index for each row of the interior."""
        return self._rows.index(self._cells(state)[1:-1, 1:-1])

    def describe(self, state: SokobanState) -> str:
        """The board with its border."""
        return self._rows.draw(np.asarray(self._cells(state)))

    def success(self, state: SokobanState) -> Bool[Array, ""]:
        """Whether every target has a box."""
        return jnp.all(~state.targets | state.boxes)

    def optimal_length(self, state: SokobanState) -> Int[Array, ""]:
        """Fewest actions to the solution, `sokoban_levels.UNSOLVABLE` if there is none."""
        left, _, node, _ = self._solution(state)
        return left[node]

    def optimal_success(self, state: SokobanState, num_actions: int) -> Float[Array, ""]:
        """1 if a solution fits into the actions, `max_steps` included, else 0."""
        left = jnp.minimum(num_actions, self.max_steps - state.steps)
        return (self.optimal_length(state) <= left).astype(jnp.float32)

    def demonstrate(self, state: SokobanState, key: chex.PRNGKey, max_actions: int) -> Demonstration:
        """A shortest solution, its first `max_actions` actions. A single move up where none exists."""
        del key
        left, after, first, target = self._solution(state)

        def act(node: Int[Array, ""], _: None) -> tuple[Int[Array, ""], Int[Array, ""]]:
            action = jnp.argmin(left[after[node]]).astype(jnp.int32)
            following = (left[node] > 0) & (left[node] < levels.UNSOLVABLE)
            return jnp.where(following, after[node, action], node), jnp.where(following, action, -1)

        _, actions = jax.lax.scan(act, first, None, length=max_actions)
        lost = left[first] >= levels.UNSOLVABLE
        actions = actions.at[0].set(jnp.where(lost, 0, actions[0]))
        width, cells = self._inner["width"], self._inner["height"] * self._inner["width"]
        box = first % cells
        direction = direction_index(target // width - box // width, target % width - box % width)
        begun = jnp.maximum(actions[0], 0)
        pushes = after[first, begun] % cells != box
        deed = jnp.where(pushes, len(ACTIONS), 0) + begun
        return Demonstration(actions, jnp.stack([direction, deed]).astype(jnp.int32))

    def _solution(
        self, state: SokobanState
    ) -> tuple[Int[Array, "states"], Int[Array, "states 4"], Int[Array, ""], Int[Array, ""]]:
        """Distances and successors of every (player, box), the present state's number, the target's cell."""
        floor = ~state.walls[1:-1, 1:-1].ravel()
        target = jnp.argmax(state.targets[1:-1, 1:-1].ravel()).astype(jnp.int32)
        box = jnp.argmax(state.boxes[1:-1, 1:-1].ravel()).astype(jnp.int32)
        player = (state.player[0] - 1) * self._inner["width"] + state.player[1] - 1
        left, after = levels.solve(floor, target, **self._inner)
        return left, after, player * floor.shape[0] + box, target

    def _board(self, cells: Bool[Array, "cells"]) -> Bool[Array, "h w"]:
        """Interior cells with a border of False around them."""
        return jnp.pad(cells.reshape(self._inner["height"], self._inner["width"]), 1)

    def _cells(self, state: SokobanState) -> Int[Array, "h w"]:
        """Positions in `SYMBOLS`."""
        rows, columns = (jnp.arange(side) for side in self.dim_room)
        player = (rows[:, None] == state.player[0]) & (columns[None, :] == state.player[1])
        cells = jnp.where(state.walls, 0, jnp.where(state.targets, 2, 1))
        cells = jnp.where(state.boxes, jnp.where(state.targets, 4, 3), cells)
        return jnp.where(player, jnp.where(state.targets, 6, 5), cells)
