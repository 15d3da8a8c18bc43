"""The run: warm start, then iterations of rollout and update, with evaluation, checkpoints and resume."""

from __future__ import annotations

import pathlib
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.checkpoint import Checkpoints
from ragen_jax.config import Config, ConfigError, load_config, save_config, to_dict
from ragen_jax.errors import UserError
from ragen_jax.loggers import MetricsFile, WandbRun, require_wandb
from ragen_jax.models.hf import save_pretrained
from ragen_jax.train.episodes import decode_episodes, write_episodes
from ragen_jax.train.evaluate import evaluate
from ragen_jax.train.program import Program, as_temperature, level_keys, policy_model, run_folder
from ragen_jax.train.sft import make_sft
from ragen_jax.train.state import begin_reinforcement, init_state
from ragen_jax.train.update import bucket, make_update
from ragen_jax.types import Trajectory


class Progress(Protocol):
    """Where a run reports to: a progress bar, or nothing."""

    def phase(self, name: str, total: int, done: int) -> None:
        """A new phase of `total` steps begins, `done` of them already behind."""

    def advance(self, metrics: dict[str, float]) -> None:
        """One step is done."""

    def say(self, line: str) -> None:
        """A line that stays."""


class TrainingStopped(UserError):
    """The run cannot go on; the message says why and what to try."""


class Run:
    """A run folder and the state in it. `step` counts supervised steps and iterations together."""

    def __init__(self, program: Program, progress: Progress) -> None:
        self.program, self.progress = program, progress
        self.config, self.folder = program.config, run_folder(program.config)
        if self.config.wandb:
            require_wandb()
        self.folder.mkdir(parents=True, exist_ok=True)
        _check_same_run(self.config, self.folder)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep=self.config.train.keep_checkpoints)
        self.state = init_state(self.config, program.model)
        restored = self.checkpoints.restore(self.state)
        if restored:
            self.state = restored[1]
            progress.say(f"resumed {self.folder} at step {restored[0]}")
        else:
            save_config(self.config, self.folder / "config.yaml")
        step = restored[0] if restored else -1
        self._sinks: list[MetricsFile | WandbRun] = [
            MetricsFile(self.folder / "metrics.jsonl", resume_step=step)
        ]
        if self.config.wandb:
            self._sinks.append(WandbRun(self.config.wandb, self.folder, to_dict(self.config)))

    @property
    def step(self) -> int:
        """Steps done, supervised and reinforcement together."""
        return int(self.state.sft_step) + int(self.state.iteration)

    def save(self) -> None:
        """Write a checkpoint of the present step, in the background."""
        self.checkpoints.save(self.step, self.state)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the policy; its episodes go to `rollouts/eval_<step>.jsonl`."""
        metrics, trajectory = evaluate(self.program, self.state.policy)
        self._write("eval", trajectory, group_size=1)
        return metrics

    def _log(self, step: int, values: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def _write(self, kind: str, trajectory: Trajectory, group_size: int) -> None:
        count = self.config.train.rollouts_kept
        episodes = decode_episodes(
            self.program, trajectory, step=self.step, group_size=group_size, count=count
        )
        write_episodes(self.folder / "rollouts" / f"{kind}_{self.step:06d}.jsonl", episodes)

    def export(self, out: pathlib.Path) -> None:
        """Write the policy as a Hugging Face folder, tokenizer included."""
        export_policy(self.program, self.state.policy, out)

    def close(self) -> None:
        """Finish writing."""
        self.checkpoints.wait()
        self.checkpoints.close()
        for sink in self._sinks:
            sink.close()

    def warm_start(self) -> None:
        """Supervised steps on the expert's episodes, up to `sft.steps` of them."""
        config, program = self.config, self.program
        total, done = config.sft.steps, int(self.state.sft_step)
        if done >= total:
            return
        assert program.replies is not None
        step = make_sft(
            config, program.env, program.settings, program.tables, program.replies, program.policy
        )
        if done == 0:
            self._log(0, {"phase": "sft", **self.evaluate()})
        self.progress.phase("warm start", total, done)
        for _ in range(done, total):
            start = time.perf_counter()
            self.state, device_metrics = step(self.state)
            metrics = _to_host(device_metrics)
            self._stop_if_broken()
            metrics["time/update_s"] = time.perf_counter() - start
            last = int(self.state.sft_step) == total
            if last:
                self.state = begin_reinforcement(config, self.state, program.policy)
            if last or self.step % config.sft.eval_every == 0:
                metrics |= self.evaluate()
            self._log(self.step, {"phase": "sft", **metrics})
            if last or self.step % config.train.save_every == 0:
                self.save()
            self.progress.advance(metrics)

    def reinforce(self) -> None:
        """Iterations of rollout and update, up to `train.iterations` of them."""
        config, program = self.config, self.program
        total, done = config.train.iterations, int(self.state.iteration)
        if done >= total:
            return
        update = make_update(config, program.policy, program.critic, program.tables.ban)
        if self.step == 0:
            self._log(0, {"phase": "rl", "iteration": 0, **self.evaluate()})
        self.progress.phase("reinforcement", total, done)
        rollout_config = config.rollout
        for iteration in range(done, total):
            start = time.perf_counter()
            trajectory = program.engine(
                self.state.policy,
                level_keys(config.train_seed + iteration * rollout_config.groups, rollout_config.groups),
                jax.random.fold_in(jax.random.fold_in(self.state.key, 0), iteration),
                as_temperature(rollout_config.temperature),
                group_size=rollout_config.group_size,
            )
            tokens, longest = _sizes(trajectory)
            rolled = time.perf_counter()
            write = iteration % config.train.rollouts_every == 0 or iteration + 1 == total
            if write:
                self._write("train", trajectory, rollout_config.group_size)
            before_update = time.perf_counter()
            self.state, device_metrics = update(
                self.state, trajectory, bucket(longest, program.engine.columns)
            )
            metrics = _to_host(device_metrics)
            updated = time.perf_counter()
            self._stop_if_broken()
            metrics[f"success/{program.env.name}"] = metrics.pop("success")
            metrics |= {
                "iteration": iteration + 1,
                "time/rollout_s": rolled - start,
                "time/update_s": updated - before_update,
                "throughput/generated_tokens_per_s": tokens / (rolled - start),
            }
            last = iteration + 1 == total
            if last or (iteration + 1) % config.train.eval_every == 0:
                metrics |= self.evaluate()
            self._log(self.step, {"phase": "rl", **metrics})
            if last or (iteration + 1) % config.train.save_every == 0:
                self.save()
            self.progress.advance(metrics)

    def _stop_if_broken(self) -> None:
        bad, limit = int(self.state.bad_steps), self.config.train.max_bad_steps
        if bad >= limit:
            raise TrainingStopped(
                f"The gradient was not finite {bad} times in a row (train.max_bad_steps={limit}), so the run "
                f"stopped at step {self.step}; the last checkpoint in {self.folder} is from before. Lower "
                "the learning rate or train.grad_clip."
            )


def export_policy(program: Program, params: nnx.State, out: pathlib.Path, *, dtype: str = "float32") -> None:
    """Write a policy as a Hugging Face folder, tokenizer included."""
    program.tokenizer.save(out)
    # The folder as its own source: which token ends a turn is read from the tokenizer's files.
    save_pretrained(policy_model(program, params), out, tokenizer_dir=out, dtype=dtype)


def train(program: Program, progress: Progress, *, supervised_only: bool = False) -> Run:
    """Bring a run to its end, from wherever it stands. Takes the parameters of the program's model."""
    run = Run(program, progress)
    try:
        if supervised_only and int(run.state.iteration):
            raise ConfigError(
                f"{run.folder} holds a run that reinforcement has begun in, so its policy is no warm start "
                "alone; choose another run_dir, or use export."
            )
        run.warm_start()
        if not supervised_only:
            run.reinforce()
        run.checkpoints.wait()
    except BaseException:
        run.close()  # a checkpoint under way is finished, whatever ended the run
        raise
    return run


@jax.jit
def _count(trajectory: Trajectory) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(trajectory.loss_mask), jnp.max(jnp.sum(trajectory.valid, axis=1))


def _sizes(trajectory: Trajectory) -> tuple[int, int]:
    """Sampled tokens of a batch and the length of its longest episode."""
    tokens, longest = jax.device_get(_count(trajectory))
    return int(tokens), int(longest)


def _to_host(metrics: dict[str, Any]) -> dict[str, Any]:
    return {k: float(np.asarray(v)) for k, v in jax.device_get(metrics).items()}


_MAY_CHANGE = {
    ("run_dir",),
    ("wandb",),
    ("train", "iterations"),
    ("train", "eval_every"),
    ("train", "save_every"),
    ("train", "keep_checkpoints"),
    ("train", "rollouts_every"),
    ("train", "rollouts_kept"),
    ("train", "max_bad_steps"),
    ("sft", "eval_every"),
}


def _check_same_run(config: Config, folder: pathlib.Path) -> None:
    """Refuse to resume under another config: the curve would be of neither."""
    path = folder / "config.yaml"
    if not path.exists() or not any((folder / "checkpoints").glob("[0-9]*")):
        return
    changed = sorted(
        ".".join(key)
        for key in _differences(to_dict(load_config(path)), to_dict(config))
        if key not in _MAY_CHANGE
    )
    if changed:
        raise ConfigError(
            f"{folder} holds a run with other settings ({', '.join(changed)}); choose another run_dir, or "
            "resume with the settings it began with."
        )


def _differences(old: dict, new: dict, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key in old.keys() | new.keys():
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, (*prefix, key))
        elif a != b:
            found.append((*prefix, key))
    return found
