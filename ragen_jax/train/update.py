"""One iteration's learning: pack, filter groups, estimate advantages, take gradient steps. One program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ragen_jax import algo
from ragen_jax.config import Config, kept_groups, update_shape
from ragen_jax.models.transformer import CausalLM, Critic
from ragen_jax.train.state import TrainState, actor_optimizer, critic_optimizer
from ragen_jax.types import Batch, Trajectory

Metrics = dict[str, Float[Array, ""]]


class Targets(NamedTuple):
    """What the gradient steps of an iteration hold fixed, beside the batch itself."""

    advantages: Float[Array, "b s"]
    returns: Float[Array, "b s"]
    values: Float[Array, "b s"]
    reference_logprobs: Float[Array, "b s"]


def pack(trajectory: Trajectory, width: int) -> Batch:
    """Pack a trajectory's columns to the left and cut them at `width` (static, at least the longest row)."""
    valid, tokens, mask, logprobs, turns, ends = algo.pack_columns(
        trajectory.valid,
        trajectory.tokens,
        trajectory.loss_mask,
        trajectory.behaviour_logprobs,
        trajectory.turn_ids,
        trajectory.turn_ends,
    )
    rewards = algo.place_rewards(trajectory.turn_rewards, ends, turns)
    return Batch(
        tokens=tokens[:, :width],
        valid=valid[:, :width],
        loss_mask=mask[:, :width],
        behaviour_logprobs=logprobs[:, :width],
        rewards=rewards[:, :width],
        returns=jnp.sum(trajectory.turn_rewards, axis=1),
    )


def bucket(longest: int, columns: int, buckets: int = 4) -> int:
    """The width to pack episodes of up to `longest` tokens to: one of a few, so that programs stay few."""
    widths = [-(-columns * (i + 1) // buckets) for i in range(buckets)]
    return next(width for width in widths if width >= longest)


def take_rows(tree: Any, rows: Int[Array, "n"]) -> Any:
    """Rows of every array of a pytree."""
    return jax.tree.map(lambda x: x[rows], tree)


class Forward:
    """The policy and critic as functions of packed rows, aligned to the token they speak of."""

    def __init__(
        self,
        config: Config,
        policy: nnx.GraphDef,
        critic: nnx.GraphDef | None,
        ban: Bool[Array, "v"],
        temperature: float,
    ) -> None:
        self._config, self._policy, self._critic = config, policy, critic
        self._ban, self._temperature = ban, temperature

    def logprobs(
        self,
        params: nnx.State,
        tokens: Int[Array, "b s"],
        valid: Bool[Array, "b s"],
        mask: Bool[Array, "b s"],
    ) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
        """Log-probability and entropy of the masked tokens; zero elsewhere.

        The head runs on masked positions alone, `train.head_chunk` of them at a time.
        """
        config = self._config
        model = nnx.merge(self._policy, params)
        hidden = model(tokens, _positions(tokens), valid, **self._how(model))[:, :-1]
        batch, length, width = hidden.shape
        sampled = config.rollout.max_turns * config.rollout.max_new_tokens
        count = batch * min(length, sampled)
        indices, real = algo.gather_loss_positions(mask[:, 1:], count=count)
        logprobs, entropy = algo.token_logprobs(
            hidden.reshape(-1, width)[indices],
            model.head_weight(),
            tokens[:, 1:].reshape(-1)[indices],
            ban=self._ban,
            temperature=self._temperature,
            chunk=min(config.train.head_chunk, count),
        )
        back = functools.partial(algo.scatter_positions, indices=indices, real=real, shape=(batch, length))
        first = jnp.zeros((batch, 1), jnp.float32)
        return (
            jnp.concatenate([first, back(logprobs)], axis=1),
            jnp.concatenate([first, back(entropy)], axis=1),
        )

    def values(
        self, params: nnx.State, tokens: Int[Array, "b s"], valid: Bool[Array, "b s"]
    ) -> Float[Array, "b s"]:
        """Value of the state in which each token was chosen: after everything before it."""
        assert self._critic is not None
        critic = nnx.merge(self._critic, params)
        values = critic(tokens, _positions(tokens), valid, **self._how(critic))
        return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))

    def _how(self, model: CausalLM | Critic) -> dict[str, bool]:
        # A few layers compile quickly anyhow, and run a sixth faster unrolled (on a CPU).
        return {"remat": self._config.model.remat, "scan_layers": model.config.num_layers > 4}


def _positions(tokens: Int[Array, "b s"]) -> Int[Array, "b s"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)


def microbatches(tree: Any, size: int) -> Any:
    return jax.tree.map(lambda x: x.reshape((x.shape[0] // size, size, *x.shape[1:])), tree)


def _mapped(function: Callable, batch: Batch, size: int) -> Float[Array, "b s"]:
    """Apply `function` to microbatches of rows, one after the other."""
    out = jax.lax.map(function, microbatches(batch, size))
    return out.reshape((-1, *out.shape[2:]))


def estimate(config: Config, forward: Forward, state: TrainState, batch: Batch) -> Targets:
    """Advantages, value targets and reference log-probabilities of the kept episodes."""
    settings, mask = config.algo, batch.loss_mask
    size = min(config.train.microbatch, batch.tokens.shape[0])
    zeros = jnp.zeros_like(batch.rewards)
    reference, frozen, critic = zeros, state.reference, state.critic
    if frozen is not None:
        reference = _mapped(
            lambda b: forward.logprobs(frozen, b.tokens, b.valid, b.loss_mask)[0], batch, size
        )
    penalty = zeros
    if settings.kl_coef and settings.kl_kind == "k1":
        kl = algo.kl_estimate(batch.behaviour_logprobs, reference, kind="k1")
        penalty = settings.kl_coef * jnp.where(mask, kl, 0.0)
    if critic is not None:
        values = _mapped(lambda b: forward.values(critic, b.tokens, b.valid), batch, size)
        advantages, returns = algo.gae(
            batch.rewards - penalty, values, mask, gamma=settings.gamma, lam=settings.lam
        )
    else:
        values = returns = zeros
        advantages = algo.grpo(
            batch.returns - jnp.sum(penalty, axis=1), mask, group_size=config.rollout.group_size
        )
    if settings.whiten and critic is not None:
        advantages = algo.whiten(advantages, mask)
    return Targets(advantages, returns, values, reference)


def make_update(
    config: Config, policy: nnx.GraphDef, critic: nnx.GraphDef | None, ban: Bool[Array, "v"]
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The jitted update `(state, trajectory, width) -> (state, metrics)`; `width` is static.

    Group statistics are taken on all episodes; then `keep_groups` of the groups are gathered by the
    standard deviation of their returns (StarPO-S, arXiv 2504.20073, section 3.3) and split into
    minibatches. The state is donated.
    """
    forward = Forward(config, policy, critic, ban, config.rollout.temperature)

    def update(state: TrainState, trajectory: Trajectory, width: int) -> tuple[TrainState, Metrics]:
        group_size = config.rollout.group_size
        everything = pack(trajectory, width)
        kept = everything
        metrics = trajectory_metrics(trajectory, everything, group_size)
        if config.algo.keep_groups < 1:
            scores = algo.group_std(everything.returns, group_size=group_size)
            groups = algo.keep_top_groups(scores, count=kept_groups(config))
            kept = take_rows(everything, algo.member_rows(groups, group_size=group_size))
            metrics["filter/kept_reward_std"] = jnp.mean(scores[groups])
        metrics["filter/kept_ratio"] = jnp.float32(kept.tokens.shape[0] / everything.tokens.shape[0])
        targets = estimate(config, forward, state, kept)
        key = jax.random.fold_in(jax.random.fold_in(state.key, 1), state.iteration)
        state, steps = _gradient_steps(config, forward, state, kept, targets, key)
        state = state._replace(iteration=state.iteration + 1)
        return state, {**metrics, **steps}

    return jax.jit(update, static_argnums=2, donate_argnums=0)


def _gradient_steps(
    config: Config, forward: Forward, state: TrainState, batch: Batch, targets: Targets, key: Array
) -> tuple[TrainState, Metrics]:
    count, size = update_shape(config)
    orders = [
        jax.random.permutation(jax.random.fold_in(key, epoch), batch.tokens.shape[0])
        for epoch in range(config.train.epochs)
    ]
    rows = jnp.concatenate(orders).reshape(config.train.epochs * count, size)

    def step(state: TrainState, rows: Int[Array, "n"]) -> tuple[TrainState, Metrics]:
        return gradient_step(config, forward, state, *take_rows((batch, targets), rows))

    state, metrics = jax.lax.scan(step, state, rows)
    # `skipped_steps` counts; everything else is the mean over the iteration's steps.
    skipped = jnp.sum(metrics.pop("update/skipped_steps"))
    return state, {**{k: jnp.mean(v) for k, v in metrics.items()}, "update/skipped_steps": skipped}


def gradient_step(
    config: Config, forward: Forward, state: TrainState, batch: Batch, targets: Targets
) -> tuple[TrainState, Metrics]:
    """One optimizer step of policy and critic on a minibatch, summed over its microbatches."""
    settings = config.algo
    weights = algo.token_weights(
        batch.loss_mask,
        aggregation=settings.aggregation,
        max_tokens=config.rollout.max_turns * config.rollout.max_new_tokens,
    )

    def actor_loss(params, micro):
        batch, targets, weights = micro
        mask = batch.loss_mask
        logprobs, entropy = forward.logprobs(params, batch.tokens, batch.valid, mask)
        loss, clipped = algo.policy_loss(
            logprobs,
            batch.behaviour_logprobs,
            targets.advantages,
            mask,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip or None,
        )
        mean = functools.partial(algo.weighted_sum, weights=weights)
        total = mean(loss) - settings.entropy_coef * mean(entropy)
        sums = {
            "policy/loss": mean(loss),
            "policy/entropy": mean(entropy),
            "policy/clip_fraction": mean(clipped.astype(jnp.float32)),
            "policy/kl_behaviour": mean(batch.behaviour_logprobs - logprobs),
        }
        if settings.kl_coef:
            kind = settings.kl_kind
            kl = algo.kl_estimate(logprobs, targets.reference_logprobs, kind=kind)
            sums["policy/kl_reference"] = mean(kl)
            if kind != "k1":
                total = total + settings.kl_coef * mean(kl)
        return total, sums

    def critic_loss(params, micro):
        batch, targets, weights = micro
        values = forward.values(params, batch.tokens, batch.valid)
        loss = algo.value_loss(values, targets.values, targets.returns, clip=settings.value_clip)
        loss = algo.weighted_sum(loss, weights)
        return loss, {"critic/loss": loss, "critic/value": algo.weighted_sum(values, weights)}

    micro = microbatches((batch, targets, weights), min(config.train.microbatch, batch.tokens.shape[0]))
    gradient, metrics = accumulate(actor_loss, state.policy, micro)
    policy, actor_opt, norm, finite = apply(actor_optimizer(config), gradient, state.actor_opt, state.policy)
    metrics["policy/grad_norm"] = norm
    critic, critic_opt = state.critic, state.critic_opt
    if critic is not None:
        gradient, more = accumulate(critic_loss, critic, micro)
        critic, critic_opt, norm, critic_finite = apply(
            critic_optimizer(config), gradient, critic_opt, critic
        )
        metrics |= {**more, "critic/grad_norm": norm}
        finite &= critic_finite
    bad = ~finite
    metrics["update/skipped_steps"] = bad.astype(jnp.float32)
    state = state._replace(
        policy=policy,
        actor_opt=actor_opt,
        critic=critic,
        critic_opt=critic_opt,
        bad_steps=jnp.where(bad, state.bad_steps + 1, 0),
    )
    return state, metrics


def accumulate(loss: Callable, params: nnx.State, micro: Any) -> tuple[nnx.State, Metrics]:
    """Sum gradients and metrics of `loss(params, microbatch) -> (total, sums)` over the microbatches.

    Weights are those of the whole minibatch, so sums are its means.
    """

    def one(total, rows):
        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(params, rows)
        return jax.tree.map(jnp.add, total, (gradient, sums)), None

    shapes = jax.eval_shape(lambda rows: loss(params, rows)[1], jax.tree.map(lambda x: x[0], micro))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, shapes))
    return jax.lax.scan(one, zeros, micro)[0]


def apply(
    optimizer: optax.GradientTransformation, gradient: Any, opt_state: optax.OptState, params: Any
) -> tuple[Any, optax.OptState, Float[Array, ""], Bool[Array, ""]]:
    """One optimizer step, left out when the gradient is not finite.

    Returns the parameters, the optimizer's state, the gradient's norm before clipping, and whether the
    step was taken.
    """
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    updates, stepped = optimizer.update(gradient, opt_state, params)
    pair = (optax.apply_updates(params, updates), stepped)
    params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), pair, (params, opt_state))
    return params, opt_state, norm, finite


def trajectory_metrics(trajectory: Trajectory, batch: Batch, group_size: int) -> Metrics:
    """What an iteration's episodes look like, as scalars; the keys are those of `metrics.jsonl`."""
    played = trajectory.turn_played
    turns = jnp.maximum(jnp.sum(played), 1)
    return {
        **algo.group_summary(batch.returns, trajectory.success, group_size=group_size),
        "reward/environment": jnp.mean(jnp.sum(trajectory.env_rewards, axis=1)),
        "response/length": jnp.sum(trajectory.loss_mask) / turns,
        "response/format_valid": jnp.sum(trajectory.format_valid & played) / turns,
        "episode/turns": jnp.mean(jnp.sum(played, axis=1)),
        "episode/actions": jnp.mean(jnp.sum(trajectory.actions >= 0, axis=(1, 2))),
        "episode/tokens": jnp.mean(jnp.sum(batch.valid, axis=1)),
    }
