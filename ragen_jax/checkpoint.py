"""Orbax checkpoints of a run: everything that exact resume needs, and nothing half-written."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from ragen_jax.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be read; the message is one sentence for the user."""


class Checkpoints:
    """The `checkpoints/` folder of a run.

    Typed random keys are stored as their data; a save that was cut off is never listed (Orbax writes to
    a temporary name first).
    """

    def __init__(self, folder: pathlib.Path, *, keep: int = 2) -> None:
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._damaged: set[int] = set()

    @property
    def steps(self) -> list[int]:
        """Steps that have a finished checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any) -> None:
        """Write `state` (a pytree of arrays) as `step`, in the background.

        An existing step stays, unless `restore` passed it over because it could not be read.
        """
        if step in self._damaged:
            self._manager.delete(step)
            self._damaged.remove(step)
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(_unwrap_keys(state)))

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """The newest (step, state) in the structure of `like`, or None where there is none.

        A newest checkpoint that cannot be read falls back to the one before with a warning.

        Raises:
          CheckpointError: there are checkpoints, and none can be read.
        """
        plain = _unwrap_keys(like)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, plain)
        reasons = []
        for step in reversed(self.steps):
            try:
                restored = self._manager.restore(step, args=ocp.args.StandardRestore(target))
            except Exception as error:  # damage shows as many types, from tensorstore's to JSON's
                reasons.append(f"step {step}: {str(error).strip().splitlines()[0][:160]}")
                continue
            self._damaged = {damaged for damaged in self.steps if damaged > step}
            for reason in reasons:
                print(f"warning: skipped a checkpoint that cannot be read ({reason})")
            return step, _wrap_keys(restored, like)
        if reasons:
            raise CheckpointError(
                f"No checkpoint under {self.folder} can be read with these settings "
                f"({'; '.join(reasons)}); take back what was overridden, or restore the folder from a copy."
            )
        return None

    def wait(self) -> None:
        """Block until the last save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish writing and let go of the folder."""
        self._manager.close()


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _unwrap_keys(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _wrap_keys(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: jax.random.wrap_key_data(x) if _is_key(y) else x, tree, like)
