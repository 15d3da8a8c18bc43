"""Small programs that tests share, so that what they compile is compiled once."""

from __future__ import annotations

import functools
import pathlib

import jax

from ragen_jax.config import Config, EnvSettings, load_config
from ragen_jax.train.program import Program, build
from ragen_jax.train.sft import make_sft
from ragen_jax.train.state import TrainState, init_state

ROOT = pathlib.Path(__file__).parents[1]


def tiny_config(env: str = "frozen_lake", **options) -> Config:
    """The quickstart's config in miniature: one layer, few and short episodes."""
    config = load_config(ROOT / "configs/quickstart.yaml")
    config.env = EnvSettings(name=env, options=options)
    config.model.tiny.layers, config.model.tiny.width, config.model.tiny.mlp_width = 1, 32, 64
    rollout = config.rollout
    rollout.groups, rollout.group_size, rollout.max_turns, rollout.max_new_tokens = 4, 4, 3, 20
    if env == "bandit":
        rollout.max_turns = rollout.max_actions_per_turn = rollout.max_actions = 1
    config.train.minibatch, config.train.microbatch, config.train.iterations = 2, 2, 4
    config.train.eval_every = config.train.save_every = config.train.rollouts_every = 2
    config.sft.steps, config.sft.batch, config.sft.lr = 30, 16, 1e-2
    config.eval.levels = 16
    return config


@functools.cache
def program(env: str = "frozen_lake") -> Program:
    """A compiled-once program; slippery where the world can be, so that every stream of draws matters."""
    return build(tiny_config(env, **({"success_rate": 0.8} if env == "frozen_lake" else {})))


@functools.cache
def warm_state(env: str = "frozen_lake") -> TrainState:
    """The program's state after a short warm start: a policy that writes mostly well-formed replies."""
    made = program(env)
    step = make_sft(made.config, made.env, made.settings, made.tables, made.replies, made.policy)
    state = jax.tree.map(lambda x: x.copy(), init_state(made.config, made.model))
    for _ in range(made.config.sft.steps):
        state, _ = step(state)
    return state
