"""The blocks of a dense Qwen or Llama: linear map, RMSNorm, rotary embedding, attention, feed-forward.

`dtype` is what a block computes in, `param_dtype` what it stores. Norms, rotary angles and the softmax are
float32 whatever the two are.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ragen_jax.models.config import ModelConfig

_MASKED = -1e30  # finite, so that a row without a key has no NaN


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`; the kernel is [in, out], the transpose of what torch stores."""

    def __init__(
        self,
        features_in: int,
        features_out: int,
        *,
        rngs: nnx.Rngs,
        dtype: Any,
        param_dtype: Any,
        stddev: float,
        bias: bool = False,
    ):
        self.dtype = jnp.dtype(dtype)
        init = nnx.initializers.normal(stddev)
        self.kernel = nnx.Param(init(rngs.params(), (features_in, features_out), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features_out,), param_dtype)) if bias else None

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        # One plain matrix product: its gradient, a sum over all rows, is then one too (on a CPU a sum over
        # two axes is a third slower).
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y = rows @ self.kernel[...].astype(self.dtype)
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)[None, :]
        return y.reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """`x / rms(x) * weight` over the last axis (Zhang and Sennrich, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, features: int, *, eps: float, dtype: Any, param_dtype: Any):
        self.eps = eps
        self.dtype = jnp.dtype(dtype)
        self.weight = nnx.Param(jnp.ones((features,), param_dtype))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (x * weight).astype(self.dtype)


def rope_frequencies(config: ModelConfig) -> Float[Array, "h2"]:
    """Radians a position for each pair of a head's coordinates.

    theta^(-2i/head_dim) (Su et al., https://arxiv.org/abs/2104.09864). Llama 3.1 divides the frequency of
    wavelengths beyond `original_max_position / low_freq_factor` by `factor`, keeps those below
    `original_max_position / high_freq_factor`, and interpolates between.
    """
    frequencies = config.rope_theta ** -(
        jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    )
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # rotations over the old context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_angles(
    config: ModelConfig, positions: Int[Array, "b t"], length: int
) -> tuple[Float[Array, "b t h2"], ...]:
    """Cosine and sine, float32, of the angles of positions below `length`.

    Looked up in a table that depends on nothing: computed where they are used, XLA would fuse them into every
    layer and head and compute them again there (on a CPU a tenth of a prefill).
    """
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * rope_frequencies(config)[None, :]
    return jnp.cos(angles)[positions], jnp.sin(angles)[positions]


def apply_rope(
    x: Float[Array, "b t *n h"], rope: tuple[Float[Array, "b t h2"], ...]
) -> Float[Array, "b t *n h"]:
    """Rotates coordinate i with coordinate i + head_dim / 2, as Hugging Face does (not i with i + 1)."""
    heads = tuple(range(2, x.ndim - 1))
    cos, sin = (jnp.expand_dims(part, heads) for part in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def attend(
    queries: Float[Array, "b t k g h"],
    keys: Float[Array, "b k h s"],
    values: Float[Array, "b k s h"],
    mask: Bool[Array, "b t s"],
) -> Float[Array, "b t kgh"]:
    """Grouped-query attention: `g` query heads share each of `k` key heads. Softmax in float32.

    Keys are stored with columns last, so that scores are sums of contiguous rows: on a CPU this makes the
    scores of a decode step 2.5 times faster than [b, k, s, h].

    A query whose mask is empty averages all values: meaningless, but finite, as padding must be.
    """
    b, t, k, g, head_dim = queries.shape
    # Heads of a group as more rows of one plain product, an additive mask, and the division left to the
    # output: on a CPU five times faster than the same sums written as grouped contractions.
    batch = ((0, 1), (0, 1))
    rows = (queries * head_dim**-0.5).transpose(0, 2, 3, 1, 4).reshape(b, k, g * t, head_dim)
    scores = jax.lax.dot_general(rows, keys, (((3,), (2,)), batch), preferred_element_type=jnp.float32)
    bias = jnp.where(mask, 0.0, _MASKED)
    scores = scores + jnp.tile(bias, (1, g, 1))[:, None]
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jax.lax.dot_general(
        weights.astype(values.dtype), values, (((3,), (2,)), batch), preferred_element_type=jnp.float32
    )
    out = (mixed / total).astype(values.dtype).reshape(b, k, g, t, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, -1)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        self.config = config
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        d, q = config.hidden_size, config.num_heads * config.head_dim
        kv, stddev = config.num_kv_heads * config.head_dim, config.init_stddev
        self.query = Linear(d, q, rngs=rngs, stddev=stddev, bias=config.qkv_bias, **kinds)
        self.key = Linear(d, kv, rngs=rngs, stddev=stddev, bias=config.qkv_bias, **kinds)
        self.value = Linear(d, kv, rngs=rngs, stddev=stddev, bias=config.qkv_bias, **kinds)
        self.out = Linear(q, d, rngs=rngs, stddev=residual_stddev(config), **kinds)
        # Assigned once: NNX fixes whether an attribute holds parameters when it is first set.
        self.query_norm = RMSNorm(config.head_dim, eps=config.norm_eps, **kinds) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, eps=config.norm_eps, **kinds) if config.qk_norm else None

    def queries(
        self, x: Float[Array, "b t d"], rope: tuple[Float[Array, "b t h2"], ...]
    ) -> Float[Array, "b t k g h"]:
        """Rotated queries. Query head i reads key head i // group."""
        kv, head_dim = self.config.num_kv_heads, self.config.head_dim
        queries = self.query(x).reshape(*x.shape[:2], kv, -1, head_dim)
        return apply_rope(queries if self.query_norm is None else self.query_norm(queries), rope)

    def keys_values(
        self, x: Float[Array, "b t d"], rope: tuple[Float[Array, "b t h2"], ...]
    ) -> tuple[Float[Array, "b k h t"], Float[Array, "b k t h"]]:
        """Rotated keys, and values."""
        shape = (*x.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        keys, values = self.key(x).reshape(shape), self.value(x).reshape(shape)
        keys = apply_rope(keys if self.key_norm is None else self.key_norm(keys), rope)
        return keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)


class MLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (SwiGLU, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        d, inner = config.hidden_size, config.intermediate_size
        self.gate = Linear(d, inner, rngs=rngs, stddev=config.init_stddev, **kinds)
        self.up = Linear(d, inner, rngs=rngs, stddev=config.init_stddev, **kinds)
        self.down = Linear(inner, d, rngs=rngs, stddev=residual_stddev(config), **kinds)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def residual_stddev(config: ModelConfig) -> float:
    """Smaller start for maps that add to the residual stream, whose variance grows with depth (GPT-2)."""
    return config.init_stddev / math.sqrt(2 * config.num_layers)
