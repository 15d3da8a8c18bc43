"""Sokoban against gym-sokoban's step and plain-Python searches."""

import collections
import importlib.util
import pathlib
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import sokoban_levels
from envs_jax.sokoban import Sokoban, SokobanState

N = 256
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


@pytest.fixture(scope="module")
def env():
    return Sokoban()


@pytest.fixture(scope="module")
def levels(env):
    """Many levels, on the host, drawn 64 at a time."""
    reset = jax.jit(jax.vmap(env.reset))
    keys = jax.random.split(jax.random.PRNGKey(0), N).reshape(-1, 64, 2)
    return jax.tree.map(lambda *x: np.concatenate(x), *(jax.device_get(reset(key)) for key in keys))


@pytest.fixture(scope="module")
def step(env):
    return jax.jit(chex.assert_max_traces(env.step, n=1))


def member(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def parse(text):
    """A state from a picture."""
    board = np.array([list(line) for line in text.split()])
    return SokobanState(
        key=np.zeros(2, np.uint32),
        walls=board == "#",
        targets=np.isin(board, list("O√S")),
        boxes=np.isin(board, list("X√")),
        player=np.argwhere(np.isin(board, list("PS")))[0].astype(np.int32),
        steps=np.int32(0),
    )


def drawing(state):
    """The board drawn from the state's fields, cell by cell."""
    text = ""
    for row in range(6):
        for column in range(6):
            target = state.targets[row, column]
            if state.walls[row, column]:
                text += "#"
            elif tuple(np.asarray(state.player)) == (row, column):
                text += "S" if target else "P"
            elif state.boxes[row, column]:
                text += "√" if target else "X"
            else:
                text += "O" if target else "_"
        text += "\n"
    return text


def optimum(state):
    """Fewest actions to a solution by forward breadth-first search, or None."""
    walls = {tuple(cell) for cell in np.argwhere(state.walls)}
    target = tuple(np.argwhere(state.targets)[0])
    start = (tuple(np.asarray(state.player)), tuple(np.argwhere(state.boxes)[0]))
    seen, queue = {start: 0}, collections.deque([start])
    while queue:
        player, box = node = queue.popleft()
        if box == target:
            return seen[node]
        for dr, dc in MOVES:
            ahead = (player[0] + dr, player[1] + dc)
            after = (ahead[0] + dr, ahead[1] + dc) if ahead == box else box
            if ahead in walls or after in walls:
                continue
            if (ahead, after) not in seen:
                seen[ahead, after] = seen[node] + 1
                queue.append((ahead, after))
    return None


def reverse_search(floor, player, target, depth_left):
    """The generator's rule as a plain recursion: (score, player, box) of the best state."""
    best, explored = [(0, player, target)], set()

    def visit(player, box, touched, left):
        left -= 1
        if left <= 0 or (player, box, touched) in explored:
            return
        explored.add((player, box, touched))
        score = abs(box[0] - target[0]) + abs(box[1] - target[1]) if touched and player != target else 0
        if score > best[0][0]:
            best[0] = (score, player, box)
        for dr, dc in MOVES:
            ahead = (player[0] + dr, player[1] + dc)
            if ahead not in floor or ahead == box:
                continue
            pulls = box == (player[0] - dr, player[1] - dc)
            visit(ahead, player if pulls else box, touched or pulls, left)

    visit(player, target, False, depth_left)
    return best[0]


def test_every_level_is_a_legal_solvable_start(levels):
    states, _ = levels
    lengths = []
    for index in range(N):
        state = member(states, index)
        assert state.targets.sum() == state.boxes.sum() == 1
        assert state.walls[[0, -1]].all()
        assert state.walls[:, [0, -1]].all()
        assert not (state.walls & (state.targets | state.boxes)).any()
        assert not (state.targets & state.boxes).any()
        assert not (state.walls | state.boxes)[tuple(state.player)]
        lengths.append(optimum(state))
        assert lengths[-1]  # neither None nor 0
    # RAGEN's own generator has a mean optimum of 4.05 on this size.
    assert 3.4 < np.mean(lengths) < 4.8
    assert len({drawing(member(states, index)) for index in range(N)}) > 0.8 * N


@pytest.mark.parametrize("depth", [300, 8])
def test_reverse_search_follows_the_recursion(depth):
    rng = np.random.default_rng(0)
    floors = rng.random((60, 16)) < 0.8
    starts = np.array([rng.choice(16, 2, replace=False) for _ in floors])
    floors[np.arange(60)[:, None], starts] = True
    search = jax.jit(
        jax.vmap(lambda f, p, t: sokoban_levels.farthest_pull(f, p, t, height=4, width=4, search_depth=depth))
    )
    players, boxes, scores = search(floors, *starts.T.astype(np.int32))
    for index, floor in enumerate(floors):
        cells = {divmod(int(cell), 4) for cell in np.flatnonzero(floor)}
        player, target = (divmod(int(cell), 4) for cell in starts[index])
        score, best_player, best_box = reverse_search(cells, player, target, depth)
        assert int(scores[index]) == score
        if score:
            assert divmod(int(players[index]), 4) == best_player
            assert divmod(int(boxes[index]), 4) == best_box
    assert (np.asarray(scores) > 0).sum() > 30


def test_room_is_what_the_walk_stamps():
    # Direction and mask choices of 4, 1 and 5 values from uniform draws; no turn unless the draw is small.
    draws = np.array([[0.9, 0.0, 0.1], [0.1, 0.9, 0.3]])  # up with a bar, then turn right with a column
    room = jax.jit(lambda s, d: sokoban_levels.build_room(s, d, height=4, width=4))
    floor = np.asarray(room(np.array([0.41, 0.21, 0.0]), draws)).reshape(4, 4)  # starts at (2, 1)
    expected = np.array([[0, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=bool)
    np.testing.assert_array_equal(floor, expected)


def test_steps_follow_gym_sokoban(levels, step, monkeypatch):
    if importlib.util.find_spec("pkg_resources") is None:
        # Newer setuptools has dropped it; gym-sokoban only finds its files with it.
        stand_in = types.ModuleType("pkg_resources")
        stand_in.resource_filename = lambda package, name: str(
            pathlib.Path(sys.modules[package].__file__).parent / name
        )
        monkeypatch.setitem(sys.modules, "pkg_resources", stand_in)
    module = pytest.importorskip("gym_sokoban.envs.sokoban_env", reason="gym-sokoban is not installed")
    states, _ = levels
    rng, total, solved = np.random.default_rng(0), 0, 0
    for index in range(N):
        state = member(states, index)
        oracle = module.SokobanEnv(dim_room=(6, 6), num_boxes=1, max_steps=100, reset=False)
        oracle.render = lambda **_: None
        fixed = np.where(state.walls, 0, np.where(state.targets, 2, 1))
        room = np.where(state.boxes, 4, fixed)
        room[tuple(state.player)] = 5
        oracle.room_fixed, oracle.room_state = fixed, room
        oracle.player_position = np.array(state.player)
        oracle.num_env_steps = oracle.reward_last = oracle.boxes_on_target = 0
        for _ in range(100 if index < 10 else 10):
            action = int(rng.integers(4))
            state, timestep = step(state, jnp.int32(action))
            _, reward, done, _ = oracle.step(action + 1)
            total += 1
            np.testing.assert_array_equal(state.player, oracle.player_position)
            np.testing.assert_array_equal(state.boxes, np.isin(oracle.room_state, [3, 4]))
            np.testing.assert_allclose(timestep.reward, reward, atol=1e-6)
            assert bool(timestep.last()) == done
            assert bool(timestep.extras["success"]) == (reward > 5)
            if done:
                solved += reward > 5
                break
    assert total > 2000
    assert solved > 5


def test_last_push_pays_exactly_and_then_nothing_moves(step):
    state = parse("######\n#____#\n#PXO_#\n#____#\n#____#\n######")
    state, timestep = step(state, jnp.int32(3))
    assert np.asarray(timestep.reward) == np.float32(10.9)
    assert timestep.last()
    again, nothing = step(state, jnp.int32(3))
    assert np.asarray(nothing.reward) == np.float32(0.0)
    chex.assert_trees_all_equal(again, state)


def test_walls_block_and_the_hundredth_action_ends_the_episode(step):
    state = parse("######\n#PX###\n#____#\n#___O#\n#____#\n######")
    for number in range(100):
        state, timestep = step(state, jnp.int32(3))
        assert np.asarray(timestep.reward) == np.float32(-0.1)
        assert bool(timestep.last()) == (number == 99)
    assert not timestep.extras["success"]
    assert tuple(np.asarray(state.player)) == (1, 1)


def test_expert_solves_in_as_few_actions_as_a_search(env, levels, step):
    states, _ = levels
    demo = jax.device_get(jax.jit(jax.vmap(lambda s: env.demonstrate(s, s.key, 40)))(states))
    shortest = jax.device_get(jax.jit(jax.vmap(env.optimal_length))(states))
    within = jax.device_get(jax.jit(jax.vmap(lambda s: env.optimal_success(s, 4)))(states))
    np.testing.assert_array_equal(within, [optimum(member(states, i)) <= 4 for i in range(N)])
    for index in range(N):
        state, actions = member(states, index), demo.actions[index]
        taken = actions[actions >= 0]
        assert len(taken) == shortest[index] == optimum(state)
        assert (actions[len(taken) :] == -1).all()
        if index < 40:
            for action in taken:
                state, timestep = step(state, jnp.int32(action))
            assert timestep.extras["success"]


@pytest.mark.parametrize(
    ("board", "thought", "first"),
    [
        ("######\n#____#\n#PXO_#\n#____#\n#____#\n######", "box must go right, so push right", "Right"),
        ("######\n#O___#\n##___#\n##X_##\n##_P_#\n######", "box must go up left, so walk left", "Left"),
        ("######\n#____#\n#PX__#\n#__O_#\n#____#\n######", "box must go down right, so push right", "Right"),
    ],
)
def test_expert_says_where_the_box_must_go(env, board, thought, first):
    state = parse(board)
    demo = jax.jit(lambda s: env.demonstrate(s, s.key, 3))(state)
    assert env.thought.render_text(np.asarray(demo.thought)) == thought
    assert env.actions[int(demo.actions[0])] == first


def test_expert_of_a_lost_position_makes_one_move(env):
    state = parse("######\n#X___#\n#____#\n#_P_O#\n#____#\n######")
    assert optimum(state) is None
    both = jax.jit(lambda s: (env.optimal_length(s), env.demonstrate(s, s.key, 3).actions))
    length, actions = both(state)
    assert int(length) == sokoban_levels.UNSOLVABLE
    assert np.asarray(actions).tolist() == [0, -1, -1]


def test_observed_text_is_the_board(env, levels, step):
    states, steps = levels
    for index in range(N):
        state = member(states, index)
        text = env.template.render_text(steps.observation[index])
        assert text == drawing(state)
        assert not text.endswith("\n\n")
    state, timestep = step(parse("######\n#____#\n#_XPO#\n#____#\n#____#\n######"), jnp.int32(3))
    board = "######\n#____#\n#_X_S#\n#____#\n#____#\n######"
    assert env.template.render_text(np.asarray(timestep.observation)) == board + "\n"
    assert env.describe(state) == board
    solved = parse("######\n#____#\n#_P√_#\n#____#\n#____#\n######")
    assert env.describe(solved) == "######\n#____#\n#_P√_#\n#____#\n#____#\n######"
    sizes = [len(slot.values) for slot in env.template.slots]
    assert (np.asarray(env.observe(solved)) < sizes).all()


def test_vocabulary_holds_only_rows_that_occur(env):
    values = env.template.slots[0].values
    # Wall or floor everywhere (16), then any of P, O, X on cells of their own, S for P on O.
    one, two, three = 4 * 2**3, 4 * 3 * 2**2, 4 * 3 * 2 * 2
    assert len(values) == len(set(values)) == 16 + (3 + 1) * one + (3 + 1) * two + three
    assert all(len(value) == 7 and value.startswith("#") and value.endswith("#\n") for value in values)


def test_border_can_be_left_out():
    env = Sokoban(show_border=False)
    state = parse("######\n#____#\n#_XPO#\n#____#\n##___#\n######")
    text = env.template.render_text(np.asarray(env.observe(state)))
    assert text == "____\n_XPO\n____\n#___\n"


def test_larger_rooms_are_solvable():
    env = Sokoban(dim_room=[7, 8])
    states, _ = jax.device_get(jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(1), 8)))
    for index in range(8):
        state = member(states, index)
        assert state.walls.shape == (7, 8)
        assert optimum(state)


def test_levels_depend_on_the_key_alone(env, levels):
    states, _ = levels
    key = jax.random.split(jax.random.PRNGKey(0), N)[3]
    again, _ = jax.device_get(jax.jit(env.reset)(key))
    chex.assert_trees_all_equal(again, member(states, 3))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_boxes": 2}, "num_boxes"),
        ({"dim_room": (10, 10)}, "dim_room"),
        ({"search_depth": 2}, "search_depth"),
        ({"max_steps": 0}, "max_steps"),
    ],
)
def test_unsupported_parameters_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        Sokoban(**kwargs)
