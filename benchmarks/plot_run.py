"""A learning curve as a picture: success on the held-out levels and in training, over wall time.

    python benchmarks/plot_run.py runs/quickstart docs/quickstart.svg [--against runs/quickstart_sft]

Time is that of the steps; the first of a phase includes its compilation, evaluations are left out. Needs the
extra `bench`.
"""

from __future__ import annotations

import argparse
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from ragen_jax.loggers import read_metrics


def curve(run: pathlib.Path) -> tuple[list[dict], np.ndarray]:
    """Metric lines and the minutes of training at each."""
    lines = read_metrics(run / "metrics.jsonl")
    seconds = [line.get("time/rollout_s", 0) + line.get("time/update_s", 0) for line in lines]
    return lines, np.cumsum(seconds) / 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path, help="a run of supervised steps alone")
    args = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "ragen-jax"  # the same run, the same file
    lines, minutes = curve(args.run)
    name = next(k.split("/")[1] for line in lines for k in line if k.startswith("eval/"))
    key = f"eval/{name}/success"
    figure, axis = plt.subplots(figsize=(7, 3.6))
    sampled = [
        (t, line[f"success/{name}"])
        for t, line in zip(minutes, lines, strict=True)
        if f"success/{name}" in line
    ]
    axis.plot(*zip(*sampled, strict=True), color="#b8c4d6", label="training episodes, temperature 1")
    for run, label, color in (
        (args.run, "warm start, then StarPO-S", "#1f5fbf"),
        (args.against, "supervised steps alone", "#c0702f"),
    ):
        if run is None:
            continue
        run_lines, run_minutes = curve(run)
        points = [(t, line[key]) for t, line in zip(run_minutes, run_lines, strict=True) if key in line]
        axis.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
    last = max((t for t, line in zip(minutes, lines, strict=True) if line["phase"] == "sft"), default=0)
    axis.axvline(last, color="grey", linewidth=0.8, linestyle=":")
    axis.text(last, 1.01, " reinforcement begins", color="grey", fontsize=8)
    axis.set(xlabel="minutes of training on two CPU cores", ylabel="success", ylim=(0, 1))
    axis.legend(loc="lower right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, metadata={"Date": None})
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
