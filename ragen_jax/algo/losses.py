"""Losses as arrays per token, and the weights that reduce them.

A loss function returns one number a token. How tokens are averaged is decided once, by `token_weights`
over a whole minibatch; the sum of `weighted_sum` over its microbatches is then the minibatch's loss,
however unevenly the tokens fall.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside any clip range and far from overflow


def token_weights(
    mask: Bool[Array, "b t"],
    *,
    aggregation: str,
    max_tokens: int | None = None,
) -> Float[Array, "b t"]:
    """Weight of each token in the loss of a minibatch; zero off the mask.

        token_mean                 1 / (all tokens)               (DAPO, arXiv 2503.14476)
        sequence_mean_token_mean   1 / (rows * tokens of the row) (GRPO, arXiv 2402.03300)
        sequence_mean_token_sum    1 / (rows * max_tokens)        (Dr. GRPO, arXiv 2503.20783)

    `max_tokens` is the constant that divides the sums of the last; None divides by one, and the other two
    do not use it. Rows without a token are padding and are not counted; an empty mask has all weights zero.
    """
    chex.assert_rank(mask, 2)
    chex.assert_type(mask, bool)
    tokens = mask.astype(jnp.float32)
    lengths = tokens.sum(axis=1, keepdims=True)
    rows = jnp.maximum((lengths > 0).sum(), 1)
    if aggregation == "token_mean":
        return tokens / jnp.maximum(tokens.sum(), 1)
    if aggregation == "sequence_mean_token_mean":
        return tokens / jnp.maximum(lengths, 1) / rows
    if aggregation == "sequence_mean_token_sum":
        return tokens / (rows * (1 if max_tokens is None else max_tokens))
    raise ValueError(f"unknown aggregation {aggregation!r}")


def weighted_sum(values: Float[Array, "b t"], weights: Float[Array, "b t"]) -> Float[Array, ""]:
    """Sum of `weights * values` in which an entry of weight zero has no say, even if it is not finite."""
    chex.assert_equal_shape([values, weights])
    return jnp.sum(weights * jnp.where(weights != 0, values, 0.0))


def policy_loss(
    logprobs: Float[Array, "b t"],
    behaviour_logprobs: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """PPO's clipped surrogate (Schulman et al., arXiv 1707.06347) with its two bounds apart.

        rho  = exp(logprobs - behaviour_logprobs)
        loss = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))
        loss = min(loss, -A c)                                  where A < 0, with the dual clip c > 1

    `clip_high > clip_low` is clip-higher (Yu et al., arXiv 2503.14476), the dual clip is from Ye et al.,
    arXiv 1912.09729: it bounds the loss of a token that the policy now likes much better than the one
    that sampled it, although it was bad. Departure: the log-ratio is limited to +-20, against overflow.

    Returns:
      loss `[b, t]`, and whether a bound holds the token, so that it has no gradient. Off the mask the loss
      and its gradient are zero whatever the inputs hold.
    """
    chex.assert_rank([logprobs, behaviour_logprobs, advantages, mask], 2)
    chex.assert_equal_shape([logprobs, behaviour_logprobs, advantages, mask])
    chex.assert_type(mask, bool)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    advantages = jnp.where(mask, advantages, 0.0)
    log_ratio = jnp.where(mask, logprobs, 0.0) - jnp.where(mask, behaviour_logprobs, 0.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    free = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss, clipped = jnp.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        over = (advantages < 0) & (loss > ceiling)
        loss, clipped = jnp.where(over, ceiling, loss), clipped | over
    return loss, clipped


def kl_estimate(
    logprobs: Float[Array, "b t"],
    reference_logprobs: Float[Array, "b t"],
    *,
    kind: str,
) -> Float[Array, "b t"]:
    """Estimates of KL(policy || reference) from the sampled tokens alone.

        d = logprobs - reference_logprobs
        k1 = d          k2 = d^2 / 2          k3 = exp(-d) - 1 + d

    Source: Schulman 2020, joschu.net/blog/kl-approx.html. k1 and k3 are unbiased as values. As a loss, the
    gradient of k1 is zero in expectation (put k1 in the reward) and that of k2 is the KL's. The exponent
    of k3 is limited to 20. Off the mask the inputs have only to be finite: weights remove those entries.
    """
    chex.assert_rank([logprobs, reference_logprobs], 2)
    chex.assert_equal_shape([logprobs, reference_logprobs])
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        return jnp.expm1(jnp.minimum(-difference, MAX_LOG_RATIO)) + difference
    raise ValueError(f"unknown KL estimate {kind!r}")


def value_loss(
    values: Float[Array, "b t"],
    old_values: Float[Array, "b t"],
    returns: Float[Array, "b t"],
    *,
    clip: float = 0.5,
) -> Float[Array, "b t"]:
    """Squared error of the critic, pessimistic about moves beyond `clip` from the old value.

        v' = v_old + clip(v - v_old, -clip, clip)
        loss = max((v - R)^2, (v' - R)^2) / 2

    The clipped value loss of PPO's first implementation; see Engstrom et al., arXiv 2005.12729. Off the
    mask the inputs have only to be finite: weights remove those entries.
    """
    chex.assert_rank([values, old_values, returns], 2)
    chex.assert_equal_shape([values, old_values, returns])
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    return 0.5 * jnp.maximum((values - returns) ** 2, (near - returns) ** 2)
