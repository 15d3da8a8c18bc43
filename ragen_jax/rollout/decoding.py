"""Conversations on a KV cache: append a message, sample a reply. Each works alone, so that a world in plain
Python can be driven turn by turn on the same cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ragen_jax.models.transformer import Cache, CausalLM, init_cache
from ragen_jax.rollout.episode import EpisodeTables
from ragen_jax.rollout.sampling import restrict, row_uniforms, sample


class Decoding(NamedTuple):
    """A batch of conversations in progress, indexed by cache column. Every field has its rows first."""

    cache: Cache
    hidden: Float[Array, "b d"]  # of the last token appended: what the next token is drawn from
    tokens: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    loss_mask: Bool[Array, "b s"]
    logprobs: Float[Array, "b s"]
    turn_ids: Int[Array, "b s"]
    lengths: Int[Array, "b"]  # tokens so far: the next position


class Reply(NamedTuple):
    """What `generate_turn` sampled: the first `lengths` of `tokens`."""

    tokens: Int[Array, "b n"]
    lengths: Int[Array, "b"]
    ended: Bool[Array, "b"]  # the policy sampled the end-of-turn token itself


def blank(model: CausalLM, batch: int, columns: int) -> Decoding:
    """Conversations without a token."""
    shape, dtype = (batch, columns), model.backbone.dtype
    return Decoding(
        cache=init_cache(model.config, batch, columns, dtype),
        hidden=jnp.zeros((batch, model.config.hidden_size), dtype),
        tokens=jnp.zeros(shape, jnp.int32),
        valid=jnp.zeros(shape, bool),
        loss_mask=jnp.zeros(shape, bool),
        logprobs=jnp.zeros(shape, jnp.float32),
        turn_ids=jnp.full(shape, -1, jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
    )


def spread(model: CausalLM, state: Decoding, batch: int, columns: int) -> Decoding:
    """Repeat every row until there are `batch`, and add blank columns until there are `columns`."""
    times = batch // state.tokens.shape[0]

    def copy(source: Array, target: Array) -> Array:
        return jax.lax.dynamic_update_slice(target, jnp.repeat(source, times, axis=0), (0,) * target.ndim)

    return jax.tree.map(copy, state, blank(model, batch, columns))


def _write(buffer: Array, block: Array, column: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, block.astype(buffer.dtype), column, axis=1)


def append(
    model: CausalLM,
    state: Decoding,
    ids: Int[Array, "b w"],
    lengths: Int[Array, "b"],
    *,
    column: Int[Array, ""],
    turn: Int[Array, ""],
) -> Decoding:
    """Append each row's message, the last `lengths` of its `ids`, in the w columns from `column` on.

    Rows of length 0 stay as they are.
    """
    chex.assert_rank([ids, lengths], [2, 1])
    width = ids.shape[1]
    rank = jnp.arange(width)[None, :] - (width - lengths[:, None])
    real = rank >= 0
    valid = _write(state.valid, real, column)
    positions = state.lengths[:, None] + jnp.maximum(rank, 0)
    hidden, cache = model.extend(ids, positions, state.cache, column, valid, last=1)
    return state._replace(
        cache=cache,
        hidden=jnp.where(lengths[:, None] > 0, hidden[:, 0], state.hidden),
        tokens=_write(state.tokens, jnp.where(real, ids, 0), column),
        valid=valid,
        turn_ids=_write(state.turn_ids, jnp.where(real, turn, -1), column),
        lengths=state.lengths + lengths,
    )


def generate_turn(
    model: CausalLM,
    head: Float[Array, "d v"],
    tables: EpisodeTables,
    state: Decoding,
    active: Bool[Array, "b"],
    keys: chex.PRNGKey,
    *,
    column: Int[Array, ""],
    turn: Int[Array, ""],
    temperature: Float[Array, ""],
    max_new_tokens: int,
) -> tuple[Decoding, Reply]:
    """Sample one reply for every active row, from `column` on; the others wait.

    A row stops at its end-of-turn token, once `</answer>` is complete however it was spelt in tokens,
    or after `max_new_tokens`. The loop ends when every row has stopped.
    """
    start, batch = column, active.shape[0]
    # One uniform a row and column: a reply does not depend on who else is in the batch.
    uniforms = row_uniforms(keys, start + jnp.arange(max_new_tokens))
    accepted = tables.stop.shape[0] - 1

    def unfinished(carry):
        step, _, going, _, _ = carry
        return (step < max_new_tokens) & jnp.any(going)

    def decode(carry):
        step, state, going, matched, ended = carry
        # Summed in float32, as in training: logits rounded to bfloat16 would be another distribution.
        logits = jnp.matmul(state.hidden, head, preferred_element_type=jnp.float32)
        logits = restrict(logits, ban=tables.ban, temperature=temperature)
        column = start + step
        token, logprob = sample(logits, uniforms[:, step], greedy=temperature <= 0)
        valid = _write(state.valid, going[:, None], column)
        hidden, cache = model.extend(token[:, None], state.lengths[:, None], state.cache, column, valid)
        state = state._replace(
            cache=cache,
            # A row that has stopped keeps what its own last token left behind.
            hidden=jnp.where(going[:, None], hidden[:, 0], state.hidden),
            tokens=_write(state.tokens, jnp.where(going, token, 0)[:, None], column),
            valid=valid,
            loss_mask=_write(state.loss_mask, going[:, None], column),
            logprobs=_write(state.logprobs, jnp.where(going, logprob, 0.0)[:, None], column),
            turn_ids=_write(state.turn_ids, jnp.where(going, turn, -1)[:, None], column),
            lengths=state.lengths + going,
        )
        ended = ended | (going & (token == tables.eot))
        matched = jnp.where(going, tables.stop[matched, token].astype(jnp.int32), matched)
        return step + 1, state, going & ~ended & (matched != accepted), matched, ended

    carry = (jnp.int32(0), state, active, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool))
    steps, state, _, _, ended = jax.lax.while_loop(unfinished, decode, carry)
    written = jnp.arange(max_new_tokens)[None, :] < steps
    window = functools.partial(
        jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=max_new_tokens, axis=1
    )
    sampled = window(state.valid) & written
    reply = Reply(
        tokens=jnp.where(sampled, window(state.tokens), 0),
        lengths=jnp.sum(sampled, axis=1, dtype=jnp.int32),
        ended=ended,
    )
    return state, reply
