"""Warm start: episodes of a scripted expert written on the device, and supervised steps on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from envs_jax import Slot, Template, TextEnv
from ragen_jax import algo
from ragen_jax.config import Config, ConfigError
from ragen_jax.rollout.episode import EpisodeSettings, EpisodeTables, turn_slots
from ragen_jax.rollout.worlds import Played, play_actions, reset_groups
from ragen_jax.text.render import RenderTables, compile_template, render
from ragen_jax.text.tokenizer import TextTokenizer
from ragen_jax.train.state import TrainState, actor_optimizer
from ragen_jax.train.update import Forward, accumulate, apply, bucket, microbatches


def reply_template(env: TextEnv, settings: EpisodeSettings) -> Template:
    """The expert's reply behind its forced start: the thought, then the answer.

    Slots, in order: those of the thought, then one for each action that a turn may hold.
    """
    first = Slot("action_1", tuple(f" {name}" for name in env.actions))
    more = [
        Slot(f"action_{n}", ("", *(f" {settings.separator} {name}" for name in env.actions)))
        for n in range(2, settings.max_actions_per_turn + 1)
    ]
    answer = Template.of(first, *more, "</answer>")
    return env.thought + Template.of("</think><answer>") + answer if settings.think else answer


def compile_replies(env: TextEnv, settings: EpisodeSettings, tokenizer: TextTokenizer) -> RenderTables:
    """Compile the expert's replies. Raises ConfigError where one is longer than a reply may be."""
    # Without the forced start as context: where <think> is ordinary text, a tokenizer may merge its last
    # character with the first of a thought, which a policy that is given `<think>` could never write.
    tables = compile_template(reply_template(env, settings), tokenizer, name="the expert's reply")
    if tables.max_length > settings.max_new_tokens:
        raise ConfigError(
            f"rollout.max_new_tokens is {settings.max_new_tokens}, but the expert's replies take up to "
            f"{tables.max_length} tokens; raise it to that or lower rollout.max_actions_per_turn."
        )
    return tables


class Demonstrations(NamedTuple):
    """Expert episodes, packed: tokens of a row are contiguous from column 0."""

    tokens: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    loss_mask: Bool[Array, "b s"]  # the expert's tokens
    success: Bool[Array, "b"]


def demonstrate(
    env: TextEnv,
    settings: EpisodeSettings,
    tables: EpisodeTables,
    replies: RenderTables,
    level_keys: chex.PRNGKey,
    key: chex.PRNGKey,
) -> Demonstrations:
    """Write one expert episode a level, in the very form that the engine gives to sampled ones."""
    batch = level_keys.shape[0]
    member_key, expert_key = jax.random.split(key)
    _, states = reset_groups(env, level_keys, jax.random.split(member_key, batch), 1)

    def turn(carry, turn):
        worlds, alive, reward = carry
        slots = turn_slots(
            env,
            settings,
            # The engine stops a reply at </answer> and writes the end of the turn itself.
            lacks_end=jnp.broadcast_to(turn > 0, (batch,)),
            reward=reward,
            turn=turn,
            observation=jax.vmap(env.observe)(worlds.states),
            actions_left=settings.max_actions - worlds.spent,
        )
        ids, length = render(tables.turn, slots, tables.turn.max_length)
        keys = jax.random.split(jax.random.fold_in(expert_key, turn), batch)
        shown = jax.vmap(lambda s, k: env.demonstrate(s, k, settings.max_actions_per_turn))(
            worlds.states, keys
        )
        thought = shown.thought if settings.think else shown.thought[:, :0]
        # Slot 0 of every further action is the empty string; the first action has no such entry.
        spoken = jnp.concatenate([jnp.maximum(shown.actions[:, :1], 0), shown.actions[:, 1:] + 1], axis=1)
        reply, reply_length = render(
            replies, jnp.concatenate([thought, spoken], axis=1).astype(jnp.int32), replies.max_length
        )
        worlds, reward, _ = play_actions(env, worlds, shown.actions, alive, settings.max_actions)
        blocks = (
            jnp.concatenate([ids, reply], axis=1),
            jnp.concatenate([_last(ids, length, alive), _last(reply, reply_length, alive)], axis=1),
            jnp.concatenate([jnp.zeros(ids.shape, bool), _last(reply, reply_length, alive)], axis=1),
        )
        alive = alive & ~worlds.done & (worlds.spent < settings.max_actions)
        return (worlds, alive, reward), blocks

    worlds = Played(states, jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32))
    start = (worlds, jnp.ones(batch, bool), jnp.zeros(batch, jnp.float32))
    (worlds, _, _), blocks = jax.lax.scan(turn, start, jnp.arange(settings.max_turns))
    tokens, valid, mask = (jnp.swapaxes(x, 0, 1).reshape(batch, -1) for x in blocks)
    prompt = jnp.broadcast_to(tables.prompt[None, :], (batch, tables.prompt.shape[0]))
    tokens = jnp.concatenate([prompt, tokens], axis=1)
    valid = jnp.concatenate([jnp.ones(prompt.shape, bool), valid], axis=1)
    mask = jnp.concatenate([jnp.zeros(prompt.shape, bool), mask], axis=1)
    valid, tokens, mask = algo.pack_columns(valid, tokens, mask)
    return Demonstrations(tokens, valid, mask, worlds.done & jax.vmap(env.success)(worlds.states))


def _last(ids: Int[Array, "b w"], length: Int[Array, "b"], alive: Bool[Array, "b"]) -> Bool[Array, "b w"]:
    width = ids.shape[1]
    return (jnp.arange(width)[None, :] >= width - length[:, None]) & alive[:, None]


def make_sft(
    config: Config,
    env: TextEnv,
    settings: EpisodeSettings,
    tables: EpisodeTables,
    replies: RenderTables,
    policy: nnx.GraphDef,
) -> Callable[[TrainState], tuple[TrainState, dict[str, Float[Array, ""]]]]:
    """The jitted supervised step: fresh levels, the expert's episodes, one Adam step on its tokens."""
    # Two programs, so that the second is no wider than the longest episode of the batch needs.
    # Supervised learning is of the distribution itself, whatever temperature it is sampled at later.
    forward = Forward(config, policy, None, tables.ban, 1.0)
    optimizer = actor_optimizer(config, config.sft.lr)

    def loss(params, micro):
        tokens, valid, mask, weights = micro
        logprobs, _ = forward.logprobs(params, tokens, valid, mask)
        value = -algo.weighted_sum(logprobs, weights)
        return value, {"sft/loss": value}

    @jax.jit
    def write(key: chex.PRNGKey, sft_step: Int[Array, ""]) -> tuple[Demonstrations, Int[Array, ""]]:
        level_key, key = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, 2), sft_step))
        levels = jax.random.split(level_key, config.sft.batch)
        shown = demonstrate(env, settings, tables, replies, levels, key)
        return shown, jnp.max(jnp.sum(shown.valid, axis=1))

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
    def learn(
        state: TrainState, shown: Demonstrations, width: int
    ) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        tokens, valid, mask = shown.tokens[:, :width], shown.valid[:, :width], shown.loss_mask[:, :width]
        weights = algo.token_weights(mask, aggregation="token_mean")
        size = min(config.train.microbatch, config.sft.batch)
        micro = microbatches((tokens, valid, mask, weights), size)
        gradient, metrics = accumulate(loss, state.policy, micro)
        params, opt, norm, finite = apply(optimizer, gradient, state.actor_opt, state.policy)
        metrics |= {
            "sft/grad_norm": norm,
            "sft/expert_success": jnp.mean(shown.success),
            "sft/tokens": jnp.sum(mask).astype(jnp.float32),
        }
        bad = jnp.where(finite, 0, state.bad_steps + 1)
        return state._replace(
            policy=params, actor_opt=opt, sft_step=state.sft_step + 1, bad_steps=bad
        ), metrics

    def step(state: TrainState) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        shown, longest = write(state.key, state.sft_step)
        return learn(state, shown, bucket(int(longest), shown.tokens.shape[1]))

    return step
