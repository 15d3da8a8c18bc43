"""Sokoban levels, drawn on the device: rooms, a reverse search, and an exact solver. One box.

Everything here works on interior cells, numbered row by row; the border is wall. `neighbours` gives the
number of cells, one past the last, for a move into the border, where `floor` is False.

Levels follow the generator of gym-sokoban as arXiv 2504.20073 uses it: a random walk stamps the room, the
box starts on its target and is pulled off it by a depth-first search that plays in reverse, and the state
with the greatest displacement wins, the first in search order among equals.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right
BACK = np.array([1, 0, 3, 2])  # the opposite of each
TURN_PROB = 0.35  # of drawing the walk's direction again
FIRST_WALK_PROBS = (0.8, 0.5)  # of a first step of the player's last walk: by displacement, one or more
WALK_ON_PROB = 0.5  # of each further step
LAST_WALK = 3  # at most so many steps
UNSOLVABLE = np.int32(1_000_000)  # a distance longer than any solution

# What a step of the walk turns into floor, around its cell.
STAMPS = np.array(
    [
        [[0, 0, 0], [1, 1, 1], [0, 0, 0]],
        [[0, 1, 0], [0, 1, 0], [0, 1, 0]],
        [[0, 0, 0], [1, 1, 0], [0, 1, 0]],
        [[0, 0, 0], [1, 1, 0], [1, 1, 0]],
        [[0, 0, 0], [0, 1, 1], [0, 1, 0]],
    ],
    dtype=bool,
)


class Level(NamedTuple):
    """A level with one box, on interior cells."""

    floor: Bool[Array, "cells"]
    player: Int[Array, ""]
    box: Int[Array, ""]
    target: Int[Array, ""]


def neighbours(height: int, width: int) -> np.ndarray:
    """Int[cells, 4]: the cell in each direction, or the number of cells where that is the border."""
    rows, columns = np.divmod(np.arange(height * width), width)
    moved = []
    for row_step, column_step in STEPS:
        r, c = rows + row_step, columns + column_step
        inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
        moved.append(np.where(inside, r * width + c, height * width))
    return np.stack(moved, axis=1).astype(np.int32)


def distances(height: int, width: int) -> np.ndarray:
    """Int[cells, cells]: Manhattan distance."""
    rows, columns = np.divmod(np.arange(height * width), width)
    return (abs(rows[:, None] - rows) + abs(columns[:, None] - columns)).astype(np.int32)


def stamps(height: int, width: int) -> np.ndarray:
    """Bool[cells, 5, cells]: what each stamp placed on each cell turns into floor."""
    table = np.zeros((height, width, len(STAMPS), height + 2, width + 2), dtype=bool)
    for row in range(height):
        for column in range(width):
            table[row, column, :, row : row + 3, column : column + 3] = STAMPS
    return table[..., 1:-1, 1:-1].reshape(height * width, len(STAMPS), height * width)


def scale(draws: Float[Array, "*n"], number: int | Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Integers in 0..number - 1 from uniform draws."""
    return jnp.floor(draws * number).astype(jnp.int32)


def build_room(
    start: Float[Array, "3"], draws: Float[Array, "steps 3"], *, height: int, width: int
) -> Bool[Array, "cells"]:
    """Floor stamped by a random walk, from uniform draws."""
    # The start may lie on the far border; the first step clamps it to the interior.
    position = scale(start[:2], jnp.array([height + 1, width + 1]))
    turns, directions, masks = draws[:, 0] < TURN_PROB, scale(draws[:, 1], 4), scale(draws[:, 2], 5)
    last = jnp.array([height - 1, width - 1])

    def walk(carry: tuple, inputs: tuple) -> tuple:
        position, direction = carry
        turn, other = inputs
        direction = jnp.where(turn, other, direction)
        position = jnp.clip(position + jnp.array(STEPS)[direction], 0, last)
        return (position, direction), position[0] * width + position[1]

    trail: Int[Array, "steps"]
    _, trail = jax.lax.scan(walk, (position, scale(start[2], 4)), (turns, directions))
    return jnp.any(jnp.asarray(stamps(height, width))[trail, masks], axis=0)


def farthest_pull(
    floor: Bool[Array, "cells"],
    player: Int[Array, ""],
    target: Int[Array, ""],
    *,
    height: int,
    width: int,
    search_depth: int,
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Player, box and score of the best state that playing in reverse from the target reaches.

    Depth first, up, down, left, right; stepping away from a box in line pulls it along. A state's score is
    the box's displacement (times box swaps: one for a single box that was pulled), 0 if the player hides the
    target. As in the source, a box that was pulled and put back differs from one never touched, which is
    number `cells` here, and a node at depth `search_depth - 1` or deeper is not entered.
    """
    cells = height * width
    bound = max(min(search_depth - 1, cells * (cells + 1)), 1)  # of the nodes on the current path
    around = jnp.asarray(neighbours(height, width))
    apart = jnp.asarray(distances(height, width))
    floor_or_border = jnp.append(floor, False)

    def expand(node: Int[Array, ""]) -> tuple[Int[Array, "4"], Bool[Array, "4"]]:
        here, box_code = node // (cells + 1), node % (cells + 1)
        box = jnp.where(box_code == cells, target, box_code)
        ahead, behind = around[here], around[here][BACK]
        legal = floor_or_border[ahead] & (ahead != box)
        return ahead * (cells + 1) + jnp.where(behind == box, here, box_code), legal

    def score(node: Int[Array, ""]) -> Int[Array, ""]:
        here, box_code = node // (cells + 1), node % (cells + 1)
        idle = (box_code == cells) | (here == target)
        return jnp.where(idle, 0, apart[jnp.minimum(box_code, cells - 1), target])

    def visit(carry: tuple) -> tuple:
        """Enter the first child that is new, or go back if there is none."""
        visited, path, depth, best, best_score = carry
        children, legal = expand(path[depth])
        children = jnp.where(legal, children, 0)
        fresh = legal & ~visited[children] & (depth + 1 < bound)
        enter = jnp.any(fresh)
        child = children[jnp.argmax(fresh)]
        visited = visited.at[child].set(visited[child] | enter)
        depth = jnp.where(enter, depth + 1, depth - 1)
        path = path.at[depth].set(jnp.where(enter, child, path[depth]))
        child_score = jnp.where(enter, score(child), -1)
        best = jnp.where(child_score > best_score, child, best)
        return visited, path, depth, best, jnp.maximum(best_score, child_score)

    root = player * (cells + 1) + cells
    visited = jnp.zeros(cells * (cells + 1), dtype=bool).at[root].set(True)
    path = jnp.zeros(bound, dtype=jnp.int32).at[0].set(root)
    state = (visited, path, jnp.int32(0), root, jnp.int32(0))
    *_, best, best_score = jax.lax.while_loop(lambda carry: carry[2] >= 0, visit, state)
    box_code = best % (cells + 1)
    return best // (cells + 1), jnp.where(box_code == cells, target, box_code), best_score


def walk_off(draws: Float[Array, "3 5"], level: Level, around: np.ndarray, first: Float[Array, ""]) -> Level:
    """Walk the player up to 3 steps over free cells, never back, so that it need not stand at the box.

    Of a step's uniform draws the first four choose among free directions, the last whether it is made:
    with probability `first` for the first step.
    """
    cells = jnp.arange(level.floor.shape[0] + 1)
    trodden = ~jnp.append(level.floor, False) | (cells == level.box) | (cells == level.player)
    probs = jnp.array([0.0] + [WALK_ON_PROB] * (LAST_WALK - 1)).at[0].set(first)

    def walk(carry: tuple, inputs: tuple) -> tuple:
        player, trodden, going = carry
        draw, prob = inputs
        ahead = jnp.asarray(around)[player]
        free = ~trodden[ahead]
        going &= (draw[4] < prob) & jnp.any(free)
        player = jnp.where(going, ahead[jnp.argmax(jnp.where(free, draw[:4], -1.0))], player)
        return (player, trodden | (cells == player), going), None

    going = jnp.ones((), dtype=bool)
    (player, _, _), _ = jax.lax.scan(walk, (level.player, trodden, going), (draws, probs))
    return level._replace(player=player)


def draw_level(key: chex.PRNGKey, *, height: int, width: int, search_depth: int) -> Level:
    """A solvable level; one that cannot be made harder than solved is drawn again.

    Under vmap the loop runs as long as its slowest member.
    """
    cells = height * width
    around = neighbours(height, width)
    steps = int(1.7 * (height + width + 4))  # of the room's walk: 1.7 times the sides with the border
    # One draw for the room's start, its walk, the player and the target, and the player's last walk:
    # each further call of the generator costs most of a second to compile.
    sizes = (3, 3 * steps, cells, 5 * LAST_WALK)

    def draw(carry: tuple) -> tuple:
        next_key, draw_key = jax.random.split(carry[0])
        draws = jax.random.uniform(draw_key, (sum(sizes),))
        start_draws, room_draws, place_draws, walk_draws = jnp.split(draws, np.cumsum(sizes)[:-1])
        floor = build_room(start_draws, room_draws.reshape(steps, 3), height=height, width=width)
        # Two cells drawn uniformly without replacement: those of the greatest of independent draws.
        _, (start, target) = jax.lax.top_k(jnp.where(floor, place_draws, -1.0), 2)
        player, box, score = farthest_pull(
            floor, start, target, height=height, width=width, search_depth=search_depth
        )
        score = jnp.where(jnp.sum(floor) > 2, score, 0)
        level = Level(floor, player, box, target)
        level = walk_off(
            walk_draws.reshape(LAST_WALK, 5), level, around, jnp.where(score == 1, *FIRST_WALK_PROBS)
        )
        return next_key, level, score

    zero = jnp.int32(0)
    nothing = (key, Level(jnp.zeros(cells, dtype=bool), zero, zero, zero), zero)
    return jax.lax.while_loop(lambda carry: carry[2] == 0, draw, nothing)[1]


def successors(floor: Bool[Array, "cells"], *, height: int, width: int) -> Int[Array, "cells cells 4"]:
    """The state, player * cells + box, that each action leads to from every (player, box)."""
    cells = height * width
    around = jnp.asarray(neighbours(height, width))
    floor_or_border = jnp.append(floor, False)
    player, box = jnp.arange(cells)[:, None, None], jnp.arange(cells)[None, :, None]
    ahead = around[:, None, :]  # [player, 1, action]
    beyond = around[None, :, :]  # [1, box, action]; where a pushed box goes
    at_box = ahead == box
    push = at_box & floor_or_border[beyond]
    walk = ~at_box & floor_or_border[ahead]
    moved_player = jnp.where(push | walk, ahead, player)
    moved_box = jnp.where(push, beyond, box)
    return moved_player * cells + moved_box


def solve(
    floor: Bool[Array, "cells"], target: Int[Array, ""], *, height: int, width: int
) -> tuple[Int[Array, "states"], Int[Array, "states 4"]]:
    """Fewest actions to the solution from every state, `UNSOLVABLE` where there is none; and `successors`.

    States are player * cells + box. One backward breadth-first layer a pass, until none is added.
    """
    cells = height * width
    after = successors(floor, height=height, width=width).reshape(cells * cells, 4)
    solved = jnp.arange(cells * cells) % cells == target
    start = jnp.where(solved, 0, UNSOLVABLE)

    def relax(carry: tuple) -> tuple:
        left, _ = carry
        closer = jnp.minimum(left, 1 + left[after].min(axis=1))
        return closer, jnp.any(closer < left)

    left, _ = jax.lax.while_loop(lambda carry: carry[1], relax, (start, jnp.ones((), dtype=bool)))
    return left, after
