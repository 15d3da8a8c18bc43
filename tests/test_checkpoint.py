"""Checkpoints: exact, bounded in number, and honest about damage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.checkpoint import CheckpointError, Checkpoints

# Orbax leaves coroutines behind where a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(value):
    return {
        "weights": jnp.full((3, 2), value, jnp.float32),
        "half": jnp.full(4, value, jnp.bfloat16),
        "key": jax.random.key(7),
        "step": jnp.int32(value),
        "absent": None,
    }


def damage(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"\0damaged\0")


@pytest.fixture
def two_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step))
    checkpoints.wait()
    checkpoints.close()
    return tmp_path / "checkpoints"


def reopen(folder):
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints.steps, checkpoints.restore(state(0))
    finally:
        checkpoints.close()


def test_the_newest_state_comes_back_exactly_keys_included(two_steps):
    steps, (step, restored) = reopen(two_steps)
    assert steps == [2, 3]
    assert step == 3
    assert restored["half"].dtype == jnp.bfloat16
    assert restored["absent"] is None
    draws = [jax.random.bits(tree["key"], (4,)) for tree in (restored, state(3))]
    np.testing.assert_array_equal(*draws)
    for name in ("weights", "half", "step"):
        np.testing.assert_array_equal(restored[name], state(3)[name])


def test_an_empty_folder_has_nothing(tmp_path):
    assert reopen(tmp_path / "new") == ([], None)


def test_a_damaged_newest_falls_back_to_the_one_before(two_steps, capsys):
    damage(two_steps / "3")
    _, (step, restored) = reopen(two_steps)
    assert step == 2
    assert int(restored["step"]) == 2
    assert "step 3" in capsys.readouterr().out


def test_a_damaged_step_is_written_again(two_steps):
    damage(two_steps / "3")
    checkpoints = Checkpoints(two_steps)
    checkpoints.restore(state(0))
    checkpoints.save(3, state(9))
    checkpoints.close()
    _, (step, restored) = reopen(two_steps)
    assert (step, int(restored["step"])) == (3, 9)


def test_nothing_but_damage_is_one_sentence_and_nothing_is_deleted(two_steps):
    for step in ("2", "3"):
        damage(two_steps / step)
    with pytest.raises(CheckpointError, match="can be read") as caught:
        reopen(two_steps)
    assert "\n" not in str(caught.value)
    assert (two_steps / "2").is_dir()
    assert (two_steps / "3").is_dir()


def test_a_checkpoint_of_another_shape_is_refused(two_steps):
    checkpoints = Checkpoints(two_steps)
    other = {**state(0), "weights": jnp.zeros((5, 5))}
    with pytest.raises(CheckpointError):
        checkpoints.restore(other)
    checkpoints.close()


def test_an_unfinished_save_is_not_listed(two_steps):
    (two_steps / "4.orbax-checkpoint-tmp").mkdir()
    assert reopen(two_steps)[0] == [2, 3]
