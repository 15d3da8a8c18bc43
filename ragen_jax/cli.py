"""The command line: `ragen-jax train | sft | eval | export | envs | view`."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train language-model agents by multi-turn reinforcement learning, in JAX.",
)
console = Console()

ConfigArg = Annotated[pathlib.Path, typer.Argument(help="YAML file, such as configs/quickstart.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, such as train.iterations=10 or algo=starpo")
]


class Bars:
    """Progress of a run in the terminal."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task: Any = None

    def phase(self, name: str, total: int, done: int) -> None:
        self._bars.start()
        self._task = self._bars.add_task(name, total=total, completed=done, note="")

    def advance(self, metrics: dict[str, float]) -> None:
        shown = {
            "sft/loss": "loss",
            "reward/mean": "reward",
            "response/format_valid": "format",
            "policy/entropy": "entropy",
        }
        note = "  ".join(f"{label} {metrics[key]:.3f}" for key, label in shown.items() if key in metrics)
        for key, value in metrics.items():
            if key.startswith("success/"):
                note = f"success {value:.2f}  {note}"
            if key.startswith("eval/") and key.endswith("/success"):
                self.say(
                    f"step {self._bars.tasks[-1].completed + 1:.0f}: evaluation success {100 * value:.1f}%"
                )
        self._bars.update(self._task, advance=1, note=note)

    def say(self, line: str) -> None:
        self._bars.console.print(line, highlight=False)

    def stop(self) -> None:
        self._bars.stop()


@contextlib.contextmanager
def _progress() -> Iterator[Bars]:
    """Bars that are taken down whatever happens; an interrupt ends the command with a word on resuming."""
    bars = Bars()
    try:
        yield bars
    except KeyboardInterrupt:
        bars.say("stopped; the same command goes on from the newest checkpoint")
        raise typer.Exit(130) from None
    finally:
        bars.stop()


def _prepare_jax() -> None:
    """Compile once for each machine: later runs of the same program start at once."""
    import jax

    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path.home() / ".cache/ragen_jax/xla"))
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def _build(config_path: pathlib.Path, overrides: list[str] | None) -> Any:
    _prepare_jax()
    from ragen_jax.config import load_config
    from ragen_jax.train.program import build

    return build(load_config(config_path, overrides))


@app.command()
def train(config: ConfigArg, overrides: Overrides = None) -> None:
    """Warm-start (if sft.steps is set), then train by reinforcement. Resumes a run folder by itself."""
    from ragen_jax.train.evaluate import ceiling, summary_line
    from ragen_jax.train.loop import train as run_training

    start = time.perf_counter()
    program = _build(config, overrides)
    with _progress() as bars:
        run = run_training(program, bars)
        best = ceiling(program)
    run.close()
    _report(program, best, summary_line)
    console.print(
        f"finished in {time.perf_counter() - start:.0f} s; look at its episodes: ragen-jax view {run.folder}"
    )


def _report(program: Any, best: float, summary_line: Any) -> None:
    """What the run learned: evaluation before, after the warm start, and at the end."""
    from ragen_jax.loggers import read_metrics
    from ragen_jax.train.program import run_folder

    name, count = program.env.name, program.config.eval.levels
    lines = read_metrics(run_folder(program.config) / "metrics.jsonl")
    lines = [line for line in lines if f"eval/{name}/success" in line]
    if not lines:
        return
    console.rule(f"{name}: {count} held-out levels")
    console.print(summary_line("before training", lines[0], name, count), highlight=False)
    warmed = [line for line in lines if line["phase"] == "sft" and line["step"] > 0]
    if warmed:
        console.print(summary_line("after the warm start", warmed[-1], name, count), highlight=False)
    trained = [line for line in lines if line["phase"] == "rl" and line["iteration"] > 0]
    if trained:
        label = f"after {trained[-1]['iteration']} RL iterations"
        console.print(summary_line(label, trained[-1], name, count), highlight=False)
    console.print(f"{'optimal play':<28} success {100 * best:5.1f}%", highlight=False)


@app.command()
def sft(config: ConfigArg, overrides: Overrides = None) -> None:
    """Warm start alone: supervised steps on expert episodes; the model is exported to RUN/model."""
    from ragen_jax.config import ConfigError
    from ragen_jax.train.evaluate import ceiling, summary_line
    from ragen_jax.train.loop import train as run_training

    program = _build(config, overrides)
    if program.config.sft.steps < 1:
        raise ConfigError(
            "sft.steps is 0; set it to the number of supervised steps, for example sft.steps=100."
        )
    with _progress() as bars:
        run = run_training(program, bars, supervised_only=True)
        best = ceiling(program)
    run.export(run.folder / "model")
    run.close()
    _report(program, best, summary_line)
    console.print(f"model: {run.folder / 'model'}", highlight=False)


@app.command(name="eval")
def evaluate(
    source: Annotated[
        pathlib.Path, typer.Argument(help="a run folder, or a config whose model.path is evaluated")
    ],
    overrides: Overrides = None,
) -> None:
    """Evaluate a run's newest checkpoint, or a model, on the fixed evaluation levels."""
    from ragen_jax.train.evaluate import ceiling, summary_line
    from ragen_jax.train.evaluate import evaluate as run_evaluation

    program, params = _restore(source, overrides)
    metrics, _ = run_evaluation(program, params)
    name, count = program.env.name, program.config.eval.levels
    console.print(summary_line(str(source), metrics, name, count), highlight=False)
    for key, value in metrics.items():
        console.print(f"  {key} {value:.4f}", highlight=False)
    console.print(f"{'optimal play':<28} success {100 * ceiling(program):5.1f}%", highlight=False)


@app.command()
def export(
    run: Annotated[pathlib.Path, typer.Argument(help="a run folder")],
    out: Annotated[pathlib.Path, typer.Option(help="folder to write")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """Write a run's newest policy as a Hugging Face folder, which transformers loads."""
    from ragen_jax.config import ConfigError
    from ragen_jax.train.loop import export_policy

    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype is {dtype!r}; choose float32 or bfloat16.")
    if (out / "config.json").exists():
        raise ConfigError(f"{out} already holds a model; choose another --out.")
    program, params = _restore(run, None)
    export_policy(program, params, out, dtype=dtype)
    console.print(f"wrote {out}", highlight=False)


@app.command()
def envs() -> None:
    """List the worlds: rules, actions, and an example of what the agent reads."""
    import jax

    import envs_jax

    for name in envs_jax.names():
        env = envs_jax.make(name)
        state, _ = env.reset(jax.random.key(0))
        console.rule(name)
        console.print(env.rules, highlight=False, markup=False)
        console.print(f"actions: {', '.join(env.actions)}", highlight=False, markup=False)
        console.print("observation:", highlight=False)
        console.print(env.template.render_text(env.observe(state).tolist()), highlight=False, markup=False)


@app.command()
def view(
    run: Annotated[pathlib.Path, typer.Argument(help="a run folder")],
    out: Annotated[pathlib.Path | None, typer.Option(help="page to write; default RUN/view.html")] = None,
) -> None:
    """Write a page of a run's curves and episodes, dialogues with their boards."""
    from ragen_jax.config import ConfigError
    from ragen_jax.viewer import write_page

    if not run.is_dir():
        raise ConfigError(f"There is no run folder {run}.")
    page = out or run / "view.html"
    count = write_page(run, page)
    console.print(f"wrote {page} with {count} episodes", highlight=False)


def _restore(source: pathlib.Path, overrides: list[str] | None) -> tuple[Any, Any]:
    """A program and parameters: the newest checkpoint of a run folder, or the model of a config."""
    from flax import nnx

    from ragen_jax.checkpoint import CheckpointError, Checkpoints
    from ragen_jax.config import ConfigError
    from ragen_jax.train.state import init_state

    if source.is_file():
        program = _build(source, overrides)
        return program, nnx.state(program.model)
    if not (source / "config.yaml").is_file():
        raise ConfigError(
            f"{source} is neither a run folder (with a config.yaml) nor a config file; to evaluate a model "
            "folder, give a config and model.path=FOLDER."
        )
    program = _build(source / "config.yaml", overrides)
    checkpoints = Checkpoints(source / "checkpoints")
    restored = checkpoints.restore(init_state(program.config, program.model))
    checkpoints.close()
    if restored is None:
        raise CheckpointError(f"{source} has no finished checkpoint yet; train it first.")
    return program, restored[1].policy


def main() -> None:
    """Entry point: a failure that the user can mend is one sentence and exit code 2."""
    from ragen_jax.errors import UserError

    # Of transformers the tokenizers alone are used, but it would advise to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        app()
    except UserError as error:
        with contextlib.suppress(Exception):
            console.file.flush()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
