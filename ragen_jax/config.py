"""The typed configuration of a run: YAML over dataclasses, dotted overrides, clear refusals."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import pathlib
import re
from collections.abc import Callable
from dataclasses import field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ragen_jax.errors import UserError


class ConfigError(UserError):
    """A configuration that cannot run; the message is one sentence for the user."""


@dataclasses.dataclass
class TinyModelConfig:
    """A Qwen2 of a few hundred thousand parameters, for `model.path: tiny`."""

    layers: int = 3
    width: int = 96
    heads: int = 4
    kv_heads: int = 2
    mlp_width: int = 256


@dataclasses.dataclass
class ModelSettings:
    path: str = "tiny"  # "tiny" (random, with its own tokenizer), a local folder, or a hub id
    dtype: str = "float32"  # of compute and of the KV cache; parameters stay float32
    rollout_dtype: str = ""  # of the policy while it samples; empty: as `dtype`
    remat: bool = True
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)


@dataclasses.dataclass
class EnvSettings:
    name: str = "frozen_lake"
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the world


@dataclasses.dataclass
class RolloutSettings:
    groups: int = 8
    group_size: int = 16
    max_turns: int = 5
    max_actions_per_turn: int = 5
    max_actions: int = 10
    max_new_tokens: int = 400
    context: int = 3600
    temperature: float = 1.0
    stages: int = 1  # sizes of the KV cache in an episode; more: faster early turns, longer compilation
    block: int = 0  # rows played at a time, so that finished episodes cost nothing; 0: all at once
    think: bool = True
    separator: str = "||"
    format_penalty: float = -0.1
    repeat_format: bool = True  # state the reply format in every turn, not in the system prompt alone
    instructions: bool = True  # False: no rules in the system prompt, for models trained from scratch


@dataclasses.dataclass
class AlgoSettings:
    name: str = "custom"  # the preset that these values come from
    estimator: str = "gae"  # gae (PPO with a critic) or grpo
    keep_groups: float = 1.0  # share of groups kept by the standard deviation of their returns
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0  # 0: off
    kl_coef: float = 0.0
    kl_kind: str = "k1"  # k1 enters the reward, as in RAGEN; k2 and k3 enter the loss
    entropy_coef: float = 0.001
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    value_clip: float = 0.5
    aggregation: str = "token_mean"


@dataclasses.dataclass
class TrainSettings:
    iterations: int = 200
    epochs: int = 1
    minibatch: int = 32  # episodes a gradient step; 0: all that were kept
    microbatch: int = 8  # episodes a forward and backward pass
    head_chunk: int = 1024  # tokens whose logits exist at a time
    actor_lr: float = 1e-6
    critic_lr: float = 1e-5
    grad_clip: float = 1.0
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    max_bad_steps: int = 5  # non-finite gradients in a row that stop the run
    eval_every: int = 10
    save_every: int = 10
    keep_checkpoints: int = 2
    rollouts_every: int = 10  # full episodes are written every n iterations
    rollouts_kept: int = 32  # episodes written each time


@dataclasses.dataclass
class SftSettings:
    steps: int = 0  # `train` warms up this long first when above 0
    batch: int = 64  # demonstrated episodes a step
    lr: float = 1e-3
    eval_every: int = 100  # supervised steps between evaluations; the last step always has one


@dataclasses.dataclass
class EvalSettings:
    levels: int = 256
    temperature: float = 0.5
    seed: int = 123


@dataclasses.dataclass
class Config:
    run_dir: str = ""  # default: runs/<name of the config file>
    wandb: str = ""  # a Weights & Biases project that gets the metrics as well
    seed: int = 0
    train_seed: int = 10_000  # first training level; levels advance from here
    model: ModelSettings = field(default_factory=ModelSettings)
    env: EnvSettings = field(default_factory=EnvSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    algo: AlgoSettings = field(default_factory=AlgoSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)


_CHOICES = {
    "algo.estimator": ("gae", "grpo"),
    "algo.kl_kind": ("k1", "k2", "k3"),
    "algo.aggregation": ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"),
    "model.dtype": ("float32", "bfloat16"),
    "model.rollout_dtype": ("", "float32", "bfloat16"),
}


# What a number must satisfy, in words, and whom it binds.
_LIMITS: list[tuple[Callable[[Any], bool], str, tuple[str, ...]]] = [
    (
        lambda x: x >= 1,
        "at least 1",
        (
            *(f"model.tiny.{name}" for name in ("layers", "width", "heads", "kv_heads", "mlp_width")),
            *(f"rollout.{name}" for name in ("groups", "group_size", "stages", "max_new_tokens")),
            *(f"rollout.{name}" for name in ("max_turns", "max_actions_per_turn", "max_actions")),
            *(f"train.{name}" for name in ("epochs", "microbatch", "head_chunk", "max_bad_steps")),
            *(f"train.{name}" for name in ("eval_every", "save_every", "rollouts_every")),
            *("train.keep_checkpoints", "sft.batch", "sft.eval_every", "eval.levels"),
        ),
    ),
    (
        lambda x: x >= 0,
        "0 or more",
        ("rollout.block", "train.iterations", "train.minibatch", "train.rollouts_kept", "sft.steps"),
    ),
    (lambda x: 0 <= x < 2**31, "from 0 to 2147483647", ("seed", "train_seed", "eval.seed")),
    (
        lambda x: 0 <= x < math.inf,
        "0 or more, and finite",
        (
            *("train.actor_lr", "train.critic_lr", "sft.lr", "eval.temperature"),
            *("algo.kl_coef", "algo.clip_high", "algo.value_clip"),
        ),
    ),
    (
        lambda x: 0 < x < math.inf,
        "above 0 (evaluation may use temperature 0), and finite",
        ("rollout.temperature",),
    ),
    (lambda x: 0 < x < math.inf, "above 0, and finite", ("train.grad_clip",)),
    (math.isfinite, "finite", ("rollout.format_penalty", "algo.entropy_coef")),
    (lambda x: 0 <= x <= 1, "from 0 to 1", ("algo.gamma", "algo.lam")),
    (lambda x: 0 < x <= 1, "above 0 and at most 1", ("algo.keep_groups",)),
    (lambda x: 0 <= x < 1, "from 0 to below 1", ("algo.clip_low", "train.adam_b1", "train.adam_b2")),
    (lambda x: x == 0 or 1 < x < math.inf, "above 1, or 0 for none", ("algo.dual_clip",)),
]


def load_config(path: str | pathlib.Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `key=value` overrides, check everything.

    Raises:
      ConfigError: no such file, bad YAML, unknown key (names the nearest known one), wrong type, or
        values that do not go together.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ConfigError(
            f"There is no config file {path}; give the path of a YAML file such as configs/quickstart.yaml."
        )
    try:
        raw = OmegaConf.load(path)
    except Exception as error:  # YAML errors come in many types; all are the file's fault
        raise ConfigError(f"{path} is not valid YAML: {_first_line(error)}.") from error
    if not isinstance(raw, DictConfig):
        raise ConfigError(f"{path} must hold keys and values, such as `seed: 1`, and no list.")
    overrides_given = [_split_override(text) for text in overrides or []]
    given = [(key, value) for key, value in overrides_given if key != "algo"]
    chosen = [value for key, value in overrides_given if key == "algo"]
    named = raw.pop("preset", None)
    # A preset that the file names lies under the file's own keys; one from the command line over them.
    layers = [_preset(path.parent, named), raw, _preset(path.parent, chosen[-1] if chosen else None)]
    config = OmegaConf.structured(Config)
    try:
        for layer in layers:
            config = OmegaConf.merge(config, layer)
        for key, value in given:
            OmegaConf.update(config, key, _yaml_value(value), force_add=key.startswith("env.options."))
        typed = OmegaConf.to_object(config)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise ConfigError(_unknown_key(str(error.full_key or error.key))) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or path}: {_first_line(error)}.") from error
    assert isinstance(typed, Config)
    if not typed.run_dir:
        typed.run_dir = f"runs/{path.stem}"
    validate(typed)
    return typed


def save_config(config: Config, path: pathlib.Path) -> None:
    """Write the resolved configuration as YAML that `load_config` reads."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain nested dictionaries."""
    return dataclasses.asdict(config)


def kept_groups(config: Config) -> int:
    """Groups that pass the filter: a number known before anything runs, so that shapes are static."""
    return max(1, round(config.rollout.groups * config.algo.keep_groups))


def update_shape(config: Config) -> tuple[int, int]:
    """(gradient steps an epoch, episodes a gradient step)."""
    episodes = kept_groups(config) * config.rollout.group_size
    size = min(config.train.minibatch or episodes, episodes)
    return episodes // size, size


def validate(config: Config) -> None:
    """Raise ConfigError for values that do not go together."""
    for key, choices in _CHOICES.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value not in choices:
            raise ConfigError(f"{key} is {value!r}; choose one of {', '.join(repr(c) for c in choices)}.")
    for fits, what, keys in _LIMITS:
        for key in keys:
            value = functools.reduce(getattr, key.split("."), config)
            if not fits(value):
                raise ConfigError(f"{key} is {value}; it must be {what}.")
    rollout, train, algo = config.rollout, config.train, config.algo
    if rollout.group_size < 2 and (algo.keep_groups < 1 or algo.estimator == "grpo"):
        use = "the variance filter (algo.keep_groups)" if algo.keep_groups < 1 else "algo.estimator=grpo"
        raise ConfigError(
            f"rollout.group_size is 1, but {use} compares members of a group; set rollout.group_size to 2 "
            "or more, or algo.keep_groups=1 algo.estimator=gae."
        )
    episodes = kept_groups(config) * rollout.group_size
    _, size = update_shape(config)
    if episodes % size:
        raise ConfigError(
            f"train.minibatch is {train.minibatch}, which does not divide the {episodes} episodes that are "
            "kept an iteration; choose a divisor."
        )
    micro = train.microbatch
    warm = config.sft.batch if config.sft.steps else micro
    for rows, what in ((size, "minibatch"), (warm, "sft.batch")):
        if rows % min(micro, rows):
            raise ConfigError(
                f"train.microbatch is {micro}, which does not divide the {what} of {rows} episodes."
            )


def _preset(folder: pathlib.Path, name: str | None) -> dict[str, Any]:
    if not name:
        return {}
    # A config's own presets first, then those of the folder one works in, then the project's.
    folders = [
        folder / "algo",
        pathlib.Path("configs/algo"),
        pathlib.Path(__file__).parents[1] / "configs/algo",
    ]
    known = {p.stem: p for place in reversed(folders) for p in sorted(place.glob("*.yaml"))}
    if name not in known:
        raise ConfigError(f"algo={name} is not a preset; known: {', '.join(sorted(known)) or 'none'}.")
    return {"algo": {**OmegaConf.load(known[name]), "name": name}}


def _split_override(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override; write key=value, for example train.iterations=10.")
    return key.strip(), value


def _yaml_value(text: str) -> Any:
    return OmegaConf.from_dotlist([f"v={text}"]).v


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _all_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for item in dataclasses.fields(cls):
        keys.append(prefix + item.name)
        factory = item.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            keys += _all_keys(factory, f"{prefix}{item.name}.")
    return keys


def _unknown_key(key: str) -> str:
    known = _all_keys(Config)
    # The whole path first; then the last part, for a key put in the wrong section.
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:
        tails = {re.sub(r".*\.", "", k): k for k in known}
        tail = difflib.get_close_matches(key.split(".")[-1], list(tails), n=1, cutoff=0.6)
        near = [tails[tail[0]]] if tail else []
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"Unknown config key {key}{hint}"
