"""`metrics.jsonl`: one JSON object a step, safe to resume."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np


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
