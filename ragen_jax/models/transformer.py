"""Decoder-only language model and critic in Flax NNX, with a forward pass for training and one on a cache.

Axes: b rows, t new tokens, s cache columns, d hidden, v vocabulary, k key heads, h head dimension.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ragen_jax.models.config import ModelConfig
from ragen_jax.models.layers import (
    MLP,
    Attention,
    Linear,
    RMSNorm,
    attend,
    rope_angles,
)

LayerCache = tuple[Float[Array, "b k h s"], Float[Array, "b k s h"]]  # keys, values
Cache = tuple[LayerCache, ...]


def init_cache(config: ModelConfig, batch: int, columns: int, dtype: Any) -> Cache:
    """Zeros: columns nobody wrote must be finite, because a masked weight of zero still multiplies them."""
    heads, size = config.num_kv_heads, config.head_dim
    keys, values = (batch, heads, size, columns), (batch, heads, columns, size)
    return tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(config.num_layers))


def _write(
    cache: LayerCache, keys: Float[Array, "b k h t"], values: Float[Array, "b k t h"], column: Int[Array, ""]
) -> LayerCache:
    """Writes the same columns of every row. Only `init_cache`, this and `attend` know the layout."""
    put = jax.lax.dynamic_update_slice_in_dim
    old_keys, old_values = cache
    return (
        put(old_keys, keys.astype(old_keys.dtype), column, axis=3),
        put(old_values, values.astype(old_values.dtype), column, axis=2),
    )


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, **kinds)
        self.attention = Attention(config, rngs=rngs, **kinds)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, **kinds)
        self.mlp = MLP(config, rngs=rngs, **kinds)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        rope: tuple[Float[Array, "b t h2"], ...],
        mask: Bool[Array, "b t s"],
        cache: LayerCache | None = None,
        column: Int[Array, ""] | int = 0,
        last: int | None = None,
    ) -> tuple[Float[Array, "b n d"], LayerCache]:
        """One block. Without a cache the queries attend to this call's own keys (s = t).

        With `last`, the outputs of the last n columns alone, on the keys and values of all t.
        """
        normed = self.attention_norm(x)
        new = self.attention.keys_values(normed, rope)
        cache = new if cache is None else _write(cache, *new, jnp.asarray(column))
        if last is not None:
            x, normed, mask, rope = jax.tree.map(lambda a: a[:, -last:], (x, normed, mask, rope))
        queries = self.attention.queries(normed, rope)
        x = x + self.attention.out(attend(queries, *cache, mask))
        return x + self.mlp(self.mlp_norm(x)), cache


class Backbone(nnx.Module):
    """Token embedding, layers and the final norm: what the policy and the critic share in shape."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.param_dtype = jnp.dtype(param_dtype)
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        init = nnx.initializers.normal(config.init_stddev)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype))
        self.layers = nnx.List([Layer(config, rngs=rngs, **kinds) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, **kinds)

    def embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        return self.embedding[...][tokens].astype(self.dtype)

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        valid: Bool[Array, "b t"],
        *,
        scan_layers: bool = True,
        remat: bool = True,
    ) -> Float[Array, "b t d"]:
        """Causal pass over packed rows; final-normed hidden states. See `CausalLM.__call__`."""
        chex.assert_rank([tokens, positions, valid], 2)
        chex.assert_equal_shape([tokens, positions, valid])
        t = tokens.shape[1]
        rope = rope_angles(self.config, positions, t)
        mask = jnp.tril(jnp.ones((t, t), bool))[None] & valid[:, None, :]

        graph, _ = nnx.split(self.layers[0])

        def block(x: Float[Array, "b t d"], params: nnx.State) -> Float[Array, "b t d"]:
            return nnx.merge(graph, params)(x, rope, mask)[0]

        if remat:
            # Inside a scan XLA cannot merge the recomputation with the first pass, so no barrier is needed.
            block = jax.checkpoint(block, prevent_cse=not scan_layers)

        x = self.embed(tokens)
        states = [nnx.split(layer)[1] for layer in self.layers]
        if scan_layers:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
            x, _ = jax.lax.scan(lambda x, params: (block(x, params), None), x, stacked)
        else:
            x = functools.reduce(block, states, x)
        return self.norm(x)

    def extend(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        cache: Cache,
        column: Int[Array, ""] | int,
        valid: Bool[Array, "b s"],
        *,
        last: int | None = None,
    ) -> tuple[Float[Array, "b n d"], Cache]:
        """Causal pass of t new columns on a cache. See `CausalLM.extend`."""
        chex.assert_rank([tokens, positions, valid], 2)
        chex.assert_equal_shape([tokens, positions])
        t, s = tokens.shape[1], valid.shape[1]
        rope = rope_angles(self.config, positions, s)
        causal = jnp.arange(s)[None, :] <= column + jnp.arange(t)[:, None]
        mask = causal[None] & valid[:, None, :]

        x = self.embed(tokens)
        extended: list[LayerCache] = []
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            # Only the layers below need every column: their outputs are keys and values further up.
            wanted = last if len(extended) == len(cache) - 1 else None
            x, layer_cache = layer(x, rope, mask, layer_cache, column, wanted)
            extended.append(layer_cache)
        return self.norm(x), tuple(extended)


class CausalLM(nnx.Module):
    """The policy: a backbone and a head, tied to the embedding or its own."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
    ):
        self.config = config
        self.backbone = Backbone(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        shape, init = (config.vocab_size, config.hidden_size), nnx.initializers.normal(config.init_stddev)
        self.head = None if config.tie_embeddings else nnx.Param(init(rngs.params(), shape, param_dtype))

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        valid: Bool[Array, "b t"],
        *,
        scan_layers: bool = True,
        remat: bool = True,
    ) -> Float[Array, "b t d"]:
        """Final-normed hidden states of packed rows, for training.

        Rows are contiguous from column 0; `valid` is false in the padding behind them. `scan_layers` stacks
        the layers' parameters inside the traced function and scans, so compile time does not grow with
        depth; `remat` recomputes each layer in the backward pass instead of keeping its activations.
        """
        return self.backbone(tokens, positions, valid, scan_layers=scan_layers, remat=remat)

    def extend(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        cache: Cache,
        column: Int[Array, ""] | int,
        valid: Bool[Array, "b s"],
        *,
        last: int | None = None,
    ) -> tuple[Float[Array, "b n d"], Cache]:
        """Hidden states of the last n of t new columns, and the cache with all of them.

        Prefill is t > 1, decode t = 1; n is `last`, or t. The last layer computes no more than n outputs.

        All rows write columns `column .. column + t - 1`; the caller keeps that range within the cache. A
        query at column c attends to the valid columns up to c, and `valid` includes the new ones. The hidden
        states of padding are finite and meaningless. Layers are unrolled: scanning a stacked cache copies it.
        """
        return self.backbone.extend(tokens, positions, cache, column, valid, last=last)

    def head_weight(self) -> Float[Array, "v d"]:
        """Output embedding in its storage dtype: the input embedding when tied."""
        return self.backbone.embedding[...] if self.head is None else self.head[...]

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
        """Float32 logits of final-normed hidden states."""
        head = self.head_weight().astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


class Critic(nnx.Module):
    """State values: a backbone of its own and a scalar head that starts at zero."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
    ):
        self.config = config
        self.backbone = Backbone(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.value = Linear(
            config.hidden_size,
            1,
            rngs=rngs,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            bias=True,
            stddev=0.0,
        )

    @classmethod
    def from_policy(cls, policy: CausalLM) -> Critic:
        """A critic that starts from the policy's backbone, copied so that either may be donated."""
        backbone = policy.backbone

        def build() -> Critic:
            return cls(
                policy.config, rngs=nnx.Rngs(0), dtype=backbone.dtype, param_dtype=backbone.param_dtype
            )

        critic = nnx.eval_shape(build)
        critic.backbone = jax.tree.map(jnp.copy, backbone)
        critic.value = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), critic.value)
        return critic

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        valid: Bool[Array, "b t"],
        *,
        scan_layers: bool = True,
        remat: bool = True,
    ) -> Float[Array, "b t"]:
        """Float32 value of the state after reading the token of each column."""
        hidden = self.backbone(tokens, positions, valid, scan_layers=scan_layers, remat=remat)
        return self.value(hidden)[:, :, 0]
