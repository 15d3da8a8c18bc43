"""Group scores, the choice of groups, and the batch summary."""

import statistics

import jax
import numpy as np
import pytest

from ragen_jax.algo import group_std, group_summary, keep_top_groups, member_rows


@pytest.mark.parametrize("jit", [False, True])
def test_group_std_has_bessels_correction(jit):
    returns = np.random.default_rng(0).normal(size=20).astype(np.float32)

    def score(returns):
        return group_std(returns, group_size=5)

    expected = [statistics.stdev(map(float, returns[i : i + 5])) for i in range(0, 20, 5)]
    np.testing.assert_allclose((jax.jit(score) if jit else score)(returns), expected, rtol=1e-5)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1.3, 10.9])
def test_equal_returns_score_exactly_zero(constant):
    with jax.debug_nans(True):
        assert group_std(np.full(16, constant, np.float32), group_size=16).tolist() == [0.0]


def test_groups_of_one_and_ragged_groups_are_refused():
    with pytest.raises(ValueError, match="group_size >= 2"):
        group_std(np.zeros(4), group_size=1)
    with pytest.raises(ValueError, match="groups of 3"):
        group_std(np.zeros(4), group_size=3)


@pytest.mark.parametrize(
    ("scores", "count", "expected"),
    [
        ([0.1, 0.5, 0.3, 0.2], 2, [1, 2]),
        ([0.5, 0.5, 0.7, 0.5], 3, [2, 0, 1]),
        ([0.0, 0.0, 0.0], 2, [0, 1]),
        ([float("nan"), 0.0, 0.2], 2, [2, 1]),
        ([0.3, 0.4], 2, [1, 0]),
    ],
)
def test_the_best_groups_are_kept_and_ties_go_to_the_lower_index(scores, count, expected):
    scores = np.array(scores, np.float32)
    assert keep_top_groups(scores, count=count).tolist() == expected
    assert jax.jit(lambda s: keep_top_groups(s, count=count))(scores).tolist() == expected


@pytest.mark.parametrize("count", [0, 4])
def test_an_impossible_count_is_refused(count):
    with pytest.raises(ValueError, match="cannot keep"):
        keep_top_groups(np.zeros(3), count=count)


def test_members_of_kept_groups():
    assert member_rows(np.array([3, 0]), group_size=4).tolist() == [12, 13, 14, 15, 0, 1, 2, 3]


def test_the_filter_sees_all_episodes_before_it_drops_any():
    returns = np.array([1, 1, 0, 10, 0, 1, 2, 2], np.float32)
    rows = member_rows(keep_top_groups(group_std(returns, group_size=2), count=2), group_size=2)
    assert returns[rows].tolist() == [0.0, 10.0, 0.0, 1.0]


def test_summary():
    returns = np.array([0.0, 1.0, 0.0, 0.0])
    success = np.array([False, True, False, False])
    summary = group_summary(returns, success, group_size=2)
    assert {name: round(float(value), 5) for name, value in summary.items()} == {
        "reward/mean": 0.25,
        "reward/in_group_std": round(0.5**0.5 / 2, 5),
        "success": 0.25,
        "pass_at_k": 0.5,
    }
    alone = group_summary(returns, success, group_size=1)
    assert "reward/in_group_std" not in alone
    assert float(alone["pass_at_k"]) == 0.25
