"""From a config to everything compiled: world, tokenizer, model, engine, update."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import envs_jax
from ragen_jax.config import Config, ConfigError
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.hf import load_pretrained
from ragen_jax.models.transformer import CausalLM, Critic
from ragen_jax.rollout.engine import Engine
from ragen_jax.rollout.episode import EpisodeSettings, EpisodeTables, compile_tables
from ragen_jax.text.render import RenderTables
from ragen_jax.text.tokenizer import TextTokenizer, load_tokenizer
from ragen_jax.train.sft import compile_replies


class Program(NamedTuple):
    """The static parts of a run; together with a `TrainState` it can do everything."""

    config: Config
    env: envs_jax.TextEnv
    settings: EpisodeSettings
    tokenizer: TextTokenizer
    tables: EpisodeTables
    replies: RenderTables | None  # the expert's, where the config has a warm start
    model: CausalLM  # as loaded: the parameters before training
    policy: nnx.GraphDef
    critic: nnx.GraphDef | None
    engine: Engine


def build(config: Config) -> Program:
    """Make the world, load tokenizer and model, compile the text tables.

    Raises:
      ConfigError: the world, the model or the context do not fit the config.
      ModelFolderError, TokenizerError, TemplateError: as `load_pretrained`, `load_tokenizer`,
        `compile_tables`.
    """
    try:
        env = envs_jax.make(config.env.name, **config.env.options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"env: {error}") from error
    tokenizer, model = load_model(config)
    settings = episode_settings(config)
    token_bytes = tokenizer.byte_tables(model.config.vocab_size)
    tables = compile_tables(env, settings, tokenizer, token_bytes)
    rollout_dtype = jnp.dtype(config.model.rollout_dtype or config.model.dtype)
    engine = Engine(
        env,
        settings,
        tables,
        _graphdef(CausalLM, model.config, rollout_dtype),
        dtype=rollout_dtype,
        max_context=config.rollout.context,
        block=config.rollout.block,
        stages=config.rollout.stages,
    )
    critic = config.algo.estimator == "gae"
    dtype = jnp.dtype(config.model.dtype)
    return Program(
        config=config,
        env=env,
        settings=settings,
        tokenizer=tokenizer,
        tables=tables,
        replies=compile_replies(env, settings, tokenizer) if config.sft.steps else None,
        model=model,
        policy=_graphdef(CausalLM, model.config, dtype),
        critic=_graphdef(Critic, model.config, dtype) if critic else None,
        engine=engine,
    )


def load_model(config: Config) -> tuple[TextTokenizer, CausalLM]:
    """The tokenizer and the model that `model.path` names; parameters in float32."""
    settings = config.model
    if settings.path == "tiny":
        tokenizer = load_tokenizer("tiny")
        return tokenizer, tiny_model(config, tokenizer.vocab_size)
    # The model first: of a folder without either, the missing weights are what a user has to know of.
    model = load_pretrained(settings.path, dtype=settings.dtype, param_dtype=jnp.float32)
    return load_tokenizer(settings.path), model


def tiny_model(config: Config, vocab_size: int) -> CausalLM:
    """A randomly initialised Qwen2 with tied embeddings, from `model.tiny` and `seed`."""
    tiny = config.model.tiny
    if tiny.width % tiny.heads or tiny.heads % tiny.kv_heads:
        raise ConfigError(
            "model.tiny: heads must divide width, and kv_heads must divide heads "
            f"(width {tiny.width}, heads {tiny.heads}, kv_heads {tiny.kv_heads})."
        )
    if tiny.width // tiny.heads % 2:
        raise ConfigError(
            f"model.tiny: a head of {tiny.width // tiny.heads} numbers (width / heads) must be even, because "
            "rotary embeddings turn pairs."
        )
    shape = ModelConfig(
        family="qwen2",
        vocab_size=vocab_size,
        hidden_size=tiny.width,
        intermediate_size=tiny.mlp_width,
        num_layers=tiny.layers,
        num_heads=tiny.heads,
        num_kv_heads=tiny.kv_heads,
        head_dim=tiny.width // tiny.heads,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
        max_position=config.rollout.context,
        # 1/sqrt(width): the usual 0.02 suits widths of thousands, and learns far slower at a hundred.
        init_stddev=tiny.width**-0.5,
    )
    return CausalLM(shape, rngs=nnx.Rngs(config.seed), dtype=jnp.dtype(config.model.dtype))


def episode_settings(config: Config) -> EpisodeSettings:
    """The rules of an episode, out of `rollout`."""
    r = config.rollout
    return EpisodeSettings(
        max_turns=r.max_turns,
        max_actions_per_turn=r.max_actions_per_turn,
        max_actions=r.max_actions,
        max_new_tokens=r.max_new_tokens,
        think=r.think,
        separator=r.separator,
        format_penalty=r.format_penalty,
        repeat_format=r.repeat_format,
        instructions=r.instructions,
    )


def level_keys(seed: int | Array, count: int) -> chex.PRNGKey:
    """Keys of levels `seed`, `seed` + 1, ...: `[count]`. A level is its seed, in training and evaluation."""
    return jax.vmap(jax.random.key)(seed + jnp.arange(count, dtype=jnp.uint32))


def policy_model(program: Program, params: nnx.State) -> CausalLM:
    """The policy as a model again, for export."""
    return nnx.merge(program.policy, params)


def _graphdef(kind: Any, shape: ModelConfig, dtype: Any) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: kind(shape, rngs=nnx.Rngs(0), dtype=dtype)))


def as_temperature(value: float) -> Float[Array, ""]:
    """A traced argument, so that another temperature is no other program."""
    return jnp.asarray(value, jnp.float32)


def run_folder(config: Config) -> pathlib.Path:
    return pathlib.Path(config.run_dir)
