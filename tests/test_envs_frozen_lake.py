"""FrozenLake against gymnasium's tables and a plain breadth-first search."""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from envs_jax.frozen_lake import FrozenLake, FrozenLakeState, slip_probabilities, transition_table

N = 256


@pytest.fixture(scope="module")
def lake():
    return FrozenLake()


@pytest.fixture(scope="module")
def still():
    return FrozenLake(success_rate=1.0)


@pytest.fixture(scope="module")
def levels(lake):
    return jax.jit(jax.vmap(lake.reset))(jax.random.split(jax.random.key(0), N))


def member(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def drawing(state):
    """The board drawn cell by cell from the state's fields."""
    rows = []
    for row in range(4):
        line = ""
        for column in range(4):
            cell = 4 * row + column
            if cell == int(state.player):
                line += "P"
            elif cell == int(state.goal):
                line += "G"
            else:
                line += "O" if bool(state.holes[cell]) else "_"
        rows.append(line + "\n")
    return "".join(rows)


def gym_of(state, success_rate):
    letters = {"P": "S", "_": "F", "O": "H", "G": "G"}
    desc = ["".join(letters[c] for c in line) for line in drawing(state).split()]
    return FrozenLakeEnv(desc=desc, is_slippery=success_rate < 1, success_rate=success_rate)


def table_of(gym_env):
    table = np.zeros((16, 4, 16))
    for cell, by_action in gym_env.P.items():
        for action, outcomes in by_action.items():
            for prob, after, _, _ in outcomes:
                table[cell, action, after] += prob
    return table


def shortest(state):
    """Fewest moves over ice, or None, without the package's own search."""
    holes = np.asarray(state.holes)
    start, goal = int(state.player), int(state.goal)
    seen, queue = {start: 0}, collections.deque([start])
    while queue:
        cell = queue.popleft()
        if cell == goal:
            return seen[cell]
        row, column = divmod(cell, 4)
        for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if 0 <= r < 4 and 0 <= c < 4 and not holes[4 * r + c] and 4 * r + c not in seen:
                seen[4 * r + c] = seen[cell] + 1
                queue.append(4 * r + c)
    return None


@pytest.mark.parametrize("rate", [1 / 3, 0.8, 1.0])
def test_transition_table_is_gymnasiums(levels, rate):
    states, _ = levels
    table = jax.jit(lambda s: transition_table(s.holes, s.goal, size=4, success_rate=rate))
    for index in range(12):
        state = member(states, index)
        np.testing.assert_allclose(table(state), table_of(gym_of(state, rate)), atol=1e-7)


def test_slip_is_exact_in_double_precision():
    third = 1 / 3
    expected = [[third, third, 0, third], [third, third, third, 0]]
    np.testing.assert_allclose(slip_probabilities(third)[:2], expected, atol=1e-12)
    np.testing.assert_allclose(slip_probabilities(0.8)[2], [0, 0.1, 0.8, 0.1], atol=1e-12)


def test_step_draws_from_the_table(levels):
    lake = FrozenLake(success_rate=0.8)
    base = FrozenLakeState(
        key=jax.random.key(0), holes=jnp.zeros(16, bool), goal=jnp.int32(15), player=jnp.int32(5)
    )
    keys = jax.random.split(jax.random.key(1), 4000)
    after, _ = jax.jit(jax.vmap(lambda key: lake.step(base._replace(key=key), 1)))(keys)
    counts = np.bincount(after.player, minlength=16) / 4000
    expected = np.zeros(16)
    expected[[4, 9, 6]] = [0.1, 0.8, 0.1]  # down from cell 5, or to its left and right
    np.testing.assert_allclose(counts, expected, atol=4 * np.sqrt(0.8 * 0.2 / 4000))


def test_steps_without_slip_follow_gymnasium(still, levels):
    states, _ = levels
    step = jax.jit(chex.assert_max_traces(still.step, n=1))
    rng = np.random.default_rng(0)
    for index in range(30):
        state, oracle = member(states, index), gym_of(member(states, index), 1.0)
        oracle.reset(seed=0)
        for _ in range(12):
            action = int(rng.integers(4))
            state, timestep = step(state, jnp.int32(action))
            cell, reward, ended, _, _ = oracle.step(action)
            assert int(state.player) == cell
            assert float(timestep.reward) == reward
            assert bool(timestep.last()) == ended
            assert bool(timestep.extras["success"]) == (reward == 1)
            if ended:
                again, nothing = step(state, jnp.int32(0))
                assert int(again.player) == cell
                assert float(nothing.reward) == 0.0
                break


def test_every_level_has_a_path_and_distinct_ends(levels):
    states, _ = levels
    for index in range(N):
        state = member(states, index)
        assert shortest(state)  # neither None nor 0
        assert not state.holes[state.player]
        assert not state.holes[state.goal]
    assert len(set(np.asarray(states.player).tolist())) == 16
    assert len(set(np.asarray(states.goal).tolist())) == 16


def test_observed_text_is_the_board(lake, levels):
    states, steps = levels
    for index in range(N):
        state = member(states, index)
        text = lake.template.render_text(np.asarray(steps.observation[index]))
        assert text == drawing(state) == lake.describe(state) + "\n"


def test_describe_shows_both_ends(lake):
    holes = jnp.zeros(16, bool).at[3].set(True)
    state = FrozenLakeState(key=jax.random.key(0), holes=holes, goal=jnp.int32(0), player=jnp.int32(3))
    assert lake.describe(state) == "G__X\n____\n____\n____"
    assert lake.describe(state._replace(player=jnp.int32(0))) == "√__O\n____\n____\n____"
    assert np.all(np.asarray(lake.observe(state._replace(player=jnp.int32(0)))) < 128)


def test_vocabulary_holds_only_rows_that_occur(lake):
    values = lake.template.slots[0].values
    # 2^4 rows without P and G, 2 * 4 * 2^3 with one of them, 4 * 3 * 2^2 with both.
    assert len(values) == len(set(values)) == 16 + 64 + 48
    assert "PGO_\n" in values


def test_expert_without_slip_takes_a_shortest_path(still, levels):
    states, _ = levels
    demo = jax.jit(jax.vmap(lambda s: still.demonstrate(s, s.key, 16)))(states)
    for index in range(N):
        state, actions = member(states, index), np.asarray(demo.actions[index])
        taken = actions[actions >= 0]
        assert len(taken) == shortest(state)
        assert (actions[len(taken) :] == -1).all()
        row, column = divmod(int(state.player), 4)
        for action in taken:
            dr, dc = [(0, -1), (1, 0), (0, 1), (-1, 0)][action]
            row, column = row + dr, column + dc
            assert not state.holes[4 * row + column]
        assert 4 * row + column == int(state.goal)


def test_expert_says_where_the_goal_is(still):
    says = jax.jit(lambda s: still.demonstrate(s, s.key, 2).thought)
    for player, goal, text in [(5, 0, "goal up left"), (5, 13, "goal down"), (5, 7, "goal right")]:
        state = FrozenLakeState(
            key=jax.random.key(0), holes=jnp.zeros(16, bool), goal=jnp.int32(goal), player=jnp.int32(player)
        )
        assert still.thought.render_text(np.asarray(says(state))) == text


def test_optimal_success_is_what_dynamic_programming_on_gymnasiums_table_says(lake, levels):
    states, _ = levels
    ours = np.asarray(jax.jit(jax.vmap(lambda s: lake.optimal_success(s, 10)))(states))
    for index in range(12):
        state = member(states, index)
        table, value = table_of(gym_of(state, 1 / 3)), np.zeros(16)
        value[int(state.goal)] = 1.0
        for _ in range(10):
            value = (table @ value).max(axis=1)
        np.testing.assert_allclose(ours[index], value[int(state.player)], atol=1e-6)
    assert 0.42 < ours.mean() < 0.58  # about one half of levels within 10 actions


def test_members_share_the_level_and_slip_on_their_own(lake, levels):
    state = FrozenLakeState(
        key=jax.random.key(0), holes=jnp.zeros(16, bool), goal=jnp.int32(15), player=jnp.int32(5)
    )
    slide = jax.jit(jax.vmap(lambda key: lake.step(state._replace(key=key), 0)[0].player))
    keys = jax.random.split(jax.random.key(2), 32)
    assert set(np.asarray(slide(keys)).tolist()) == {1, 4, 9}
    np.testing.assert_array_equal(slide(keys), slide(keys))


def test_reset_depends_on_the_key_alone(lake, levels):
    states, _ = levels
    again, _ = jax.jit(jax.vmap(lake.reset))(jax.random.split(jax.random.key(0), N))
    chex.assert_trees_all_equal(again[1:], states[1:])
    assert len({drawing(member(states, i)) for i in range(50)}) > 45


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [({"size": 9}, "size"), ({"frozen_prob": 0.0}, "frozen"), ({"success_rate": 2}, "rate")],
)
def test_bad_parameters_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        FrozenLake(**kwargs)
