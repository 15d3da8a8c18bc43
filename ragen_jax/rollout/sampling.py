"""Sampling from a large vocabulary without a sort and without a draw per token."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK = 256
_BANNED = -1e30  # finite: keeps differences and gradients free of NaN


def restrict(
    logits: Float[Array, "b v"], *, ban: Bool[Array, "v"], temperature: Float[Array, ""] | float
) -> Float[Array, "b v"]:
    """Float32 logits of the distribution that is sampled: tempered, banned tokens at (almost) no mass.

    Temperature 0 leaves the scale alone; `sample` then takes the most likely token.
    """
    scale = jnp.where(temperature > 0, temperature, 1.0)
    return jnp.where(ban[None, :], _BANNED, logits.astype(jnp.float32) / scale)


def sample(
    logits: Float[Array, "b v"], uniforms: Float[Array, "b"], *, greedy: Bool[Array, ""] | bool = False
) -> tuple[Int[Array, "b"], Float[Array, "b"]]:
    """Draw one token a row by the inverse of its cumulative distribution, in two levels.

    First the block of 256 tokens, then the token inside the block, so that no cumulative sum runs over
    the whole vocabulary.

    Args:
      logits: unnormalised log-probabilities as `restrict` returns them.
      uniforms: one draw from [0, 1) a row.
      greedy: take the most likely token instead.

    Returns:
      Token ids (int32) and their log-probabilities (float32) under softmax(logits).
    """
    chex.assert_rank([logits, uniforms], [2, 1])
    batch, vocab = logits.shape
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(batch, -1, _BLOCK)
    block_mass = jnp.sum(blocks, axis=-1)
    block_ends = jnp.cumsum(block_mass, axis=-1)
    total = block_ends[:, -1:]
    target = uniforms[:, None] * total
    block = jnp.sum(block_ends <= target, axis=-1, keepdims=True)
    block = jnp.minimum(block, block_mass.shape[1] - 1)
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    start = jnp.take_along_axis(block_ends - block_mass, block, axis=1)
    offset = jnp.sum(jnp.cumsum(inside, axis=-1) <= target - start, axis=-1, keepdims=True)
    drawn = jnp.minimum(block * _BLOCK + offset, vocab - 1)
    # The two levels round differently; a draw that falls in the gap must not land on a token without mass.
    unfit = (jnp.take_along_axis(weights, drawn, axis=1) == 0) | jnp.asarray(greedy)

    def most_likely() -> Int[Array, "b 1"]:
        return jnp.where(unfit, jnp.argmax(logits, axis=-1, keepdims=True), drawn)

    token = jax.lax.cond(jnp.any(unfit), most_likely, lambda: drawn)  # rarely: a pass over all logits
    logprobs = jnp.take_along_axis(logits, token, axis=1) - top - jnp.log(total)
    return token[:, 0].astype(jnp.int32), logprobs[:, 0]


def row_uniforms(keys: chex.PRNGKey, columns: Int[Array, "n"]) -> Float[Array, "b n"]:
    """One uniform a row and column, from the row's own stream: independent of how the batch is laid out."""

    def draw(key: chex.PRNGKey, column: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.uniform(jax.random.fold_in(key, column))

    return jax.vmap(lambda key: jax.vmap(functools.partial(draw, key))(columns))(keys)
