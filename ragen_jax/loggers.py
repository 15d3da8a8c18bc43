"""Where a run's numbers go: `metrics.jsonl`, one JSON object a step, and Weights & Biases if asked for."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import secrets
from typing import Any

import numpy as np

from ragen_jax.errors import UserError


class MetricsFile:
    """Appends one object a step; on resume, drops what lies past the checkpoint."""

    def __init__(self, path: pathlib.Path, *, resume_step: int) -> None:
        """Keep the lines whose `step` is at most `resume_step`, in order, and append from there."""
        kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
        replacement = path.with_suffix(".tmp")
        replacement.write_text("".join(json.dumps(line) + "\n" for line in kept))
        replacement.replace(path)
        self._file = path.open("a")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write `values` (scalars) under `step` and flush: a reader sees whole lines."""
        self._file.write(json.dumps({"step": step, **{k: _plain(v) for k, v in values.items()}}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def require_wandb() -> None:
    """Raise UserError where the package is missing: before a run begins, not in its middle."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError("wandb is set, but the package is not installed; pip install 'ragen-jax[wandb]'.")


class WandbRun:
    """The numbers of a run in Weights & Biases as well. A resumed run goes on with the same curve."""

    def __init__(self, project: str, folder: pathlib.Path, config: dict[str, Any]) -> None:
        """Needs the extra `wandb`. Its id and its files lie in `folder`.

        Raises:
          UserError: Weights & Biases cannot begin the run, for example for want of a login.
        """
        import wandb

        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=id_file.read_text(),
                resume="allow",
                dir=folder,
                config=config,
            )
        except wandb.errors.Error as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"Weights & Biases cannot begin ({reason}); set WANDB_MODE=offline, or leave wandb out."
            ) from error

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log `values` (scalars) under `step`."""
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a line that a kill cut off is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(np.asarray(value))
    # JSON has no NaN or infinity; a missing number is null.
    return number if np.isfinite(number) else None
