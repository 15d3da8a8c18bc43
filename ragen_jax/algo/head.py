"""Log-probability and entropy of tokens without the `[n, v]` array of logits.

With a vocabulary of 151,936 the float32 logits of 2,048 tokens are 1.2 GB, and a plain gradient keeps
several such arrays. Here one chunk of rows is alive at a time, forward and backward, and the head runs
only on the positions that carry loss.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BANNED = -1e30  # finite, so that a probability of zero times a logit is zero and not NaN


def token_logprobs(
    hidden: Float[Array, "n d"],
    head: Float[Array, "v d"],
    targets: Int[Array, "n"],
    *,
    ban: Bool[Array, "v"],
    temperature: Float[Array, ""] | float,
    chunk: int,
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Log-probability of each target and entropy of each row's distribution, in float32.

        z = hidden head^T / temperature,  z = -1e30 on banned ids
        logprob_i = z_{i, target_i} - logsumexp_j z_ij
        entropy_i = -sum_j p_ij log p_ij

    This is the distribution that tokens were sampled from: banned ids have probability zero and no
    gradient. Differentiable once, in reverse, with respect to `hidden` and `head`; `temperature` is a
    constant (its gradient is zero). Products are taken in the inputs' dtype and accumulated in float32,
    the gradient of `head` over all chunks included.

    Args:
      chunk: rows whose logits exist at one time; n need not be a multiple.
    """
    chex.assert_rank([hidden, head, targets, ban], [2, 2, 1, 1])
    chex.assert_equal_shape_prefix([hidden, targets], 1)
    chex.assert_equal_shape_prefix([head, ban], 1)
    chex.assert_equal(hidden.shape[1], head.shape[1])
    chex.assert_type([targets, ban], [int, bool])
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    count, width = hidden.shape
    chunk = max(min(chunk, count), 1)
    padding = -count % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, width)
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    logprobs, entropy = _chunked(hidden, head, targets, ban, temperature)
    return logprobs.reshape(-1)[:count], entropy.reshape(-1)[:count]


def _dot(left: Array, right: Array, axes: tuple[int, int]) -> Float[Array, "x y"]:
    """Matrix product over one axis of each, operands in their common dtype, result in float32."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((axes[0],), (axes[1],)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _scaled_logits(hidden, head, ban, temperature) -> Float[Array, "c v"]:
    return jnp.where(ban[None, :], BANNED, _dot(hidden, head, (1, 1)) / temperature)


# The gradient is written by hand for two reasons: autodiff of a scan would add up the head's gradient in
# the head's own dtype (bfloat16 loses most of it), and saving the normaliser spares the backward pass its
# reductions over the vocabulary.
@jax.custom_vjp
def _chunked(hidden, head, targets, ban, temperature):
    return _chunked_forward(hidden, head, targets, ban, temperature)[0]


def _chunked_forward(hidden, head, targets, ban, temperature):
    def one(rows):
        hidden, targets = rows
        logits = _scaled_logits(hidden, head, ban, temperature)
        normaliser = jax.nn.logsumexp(logits, axis=1)
        log_p = logits - normaliser[:, None]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
        return jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0], entropy, normaliser

    logprobs, entropy, normaliser = jax.lax.map(one, (hidden, targets))
    return (logprobs, entropy), (hidden, head, targets, ban, temperature, entropy, normaliser)


def _chunked_backward(saved, cotangents):
    """With g and h the cotangents of logprob and entropy, and z the scaled logits,

    dz_j = g (1[j = target] - p_j) - h p_j (log p_j + entropy).
    """
    hidden, head, targets, ban, temperature, entropy, normaliser = saved
    ids = jnp.arange(head.shape[0], dtype=targets.dtype)

    def one(head_gradient, rows):
        hidden, targets, entropy, normaliser, g, h = (
            rows[0],
            *(array[:, None] for array in rows[1:]),
        )
        log_p = _scaled_logits(hidden, head, ban, temperature) - normaliser
        slope = jnp.where(ids[None, :] == targets, g, 0.0) - jnp.exp(log_p) * (g + h * (log_p + entropy))
        slope = (jnp.where(ban[None, :], 0.0, slope) / temperature).astype(
            jnp.promote_types(hidden.dtype, head.dtype)
        )
        head_gradient = head_gradient + _dot(slope, hidden, (0, 0))
        return head_gradient, _dot(slope, head, (1, 0)).astype(hidden.dtype)

    head_gradient, hidden_gradient = jax.lax.scan(
        one,
        jnp.zeros(head.shape, jnp.float32),
        (hidden, targets, entropy, normaliser, *cotangents),
    )
    return hidden_gradient, head_gradient.astype(head.dtype), None, None, jnp.zeros_like(temperature)


_chunked.defvjp(_chunked_forward, _chunked_backward)


def gather_loss_positions(
    mask: Bool[Array, "b t"], *, count: int
) -> tuple[Int[Array, "count"], Bool[Array, "count"]]:
    """Flat indices `row * t + column` of the mask's positions, in order, in an array of static size.

    Entries beyond the mask's own count are 0 and not `real`. `count` has to cover the mask, because
    positions beyond it are dropped: take a bound by shape, such as rows x turns x tokens a turn.
    """
    chex.assert_rank(mask, 2)
    chex.assert_type(mask, bool)
    (indices,) = jnp.nonzero(mask.reshape(-1), size=count, fill_value=0)
    return indices, jnp.arange(count) < mask.sum()


def scatter_positions(
    values: Float[Array, "count"],
    indices: Int[Array, "count"],
    real: Bool[Array, "count"],
    shape: tuple[int, int],
) -> Float[Array, "b t"]:
    """Put values back at their flat indices in an array of `shape`; zero elsewhere.

    The inverse of taking `indices` on the mask. Entries that are not real have no effect and no gradient.
    """
    chex.assert_rank([values, indices, real], 1)
    chex.assert_equal_shape([values, indices, real])
    chex.assert_type(real, bool)
    # Unreal entries all point at position 0, where they add zero.
    flat = jnp.zeros(shape[0] * shape[1], values.dtype).at[indices].add(jnp.where(real, values, 0.0))
    return flat.reshape(shape)
