"""Everything that training carries from one step to the next."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from ragen_jax.config import Config
from ragen_jax.models.transformer import CausalLM, Critic


class TrainState(NamedTuple):
    """The state of a run; with the config it determines everything that follows.

    Levels and random draws are derived from `key` and `iteration`, so nothing else needs saving.
    """

    iteration: Int[Array, ""]  # reinforcement iterations done
    sft_step: Int[Array, ""]  # supervised steps done
    key: chex.PRNGKey  # never changes; folded with the iteration
    policy: nnx.State  # float32
    critic: nnx.State | None  # None without a critic
    reference: nnx.State | None  # None without a KL term
    actor_opt: optax.OptState
    critic_opt: optax.OptState | None
    bad_steps: Int[Array, ""]  # non-finite gradients in a row


def actor_optimizer(config: Config, lr: float | None = None) -> optax.GradientTransformation:
    """Adam behind a global-norm clip."""
    train = config.train
    return _adam(config, train.actor_lr if lr is None else lr)


def critic_optimizer(config: Config) -> optax.GradientTransformation:
    """As the actor's, with the critic's learning rate."""
    return _adam(config, config.train.critic_lr)


def _adam(config: Config, lr: float) -> optax.GradientTransformation:
    train = config.train
    return optax.chain(
        optax.clip_by_global_norm(train.grad_clip), optax.adam(lr, b1=train.adam_b1, b2=train.adam_b2)
    )


def init_state(config: Config, model: CausalLM) -> TrainState:
    """The state before the first step: takes the model's parameters, copies them where needed twice."""
    policy = nnx.state(model)
    critic = nnx.state(Critic.from_policy(model)) if config.algo.estimator == "gae" else None
    return TrainState(
        iteration=jnp.int32(0),
        sft_step=jnp.int32(0),
        key=jax.random.key(config.seed),
        policy=policy,
        critic=critic,
        reference=jax.tree.map(jnp.copy, policy) if config.algo.kl_coef else None,
        actor_opt=actor_optimizer(config).init(policy),
        critic_opt=None if critic is None else critic_optimizer(config).init(critic),
        bad_steps=jnp.int32(0),
    )


def begin_reinforcement(config: Config, state: TrainState, graphdef: nnx.GraphDef) -> TrainState:
    """Hand over from the warm start: critic and reference start from the warmed policy, optimizers anew."""
    fresh = init_state(config, nnx.merge(graphdef, state.policy))
    return fresh._replace(key=state.key, sft_step=state.sft_step)
