"""Noticing a string in sampled tokens, whatever tokens spell it."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

from ragen_jax.text.types import TokenBytes

__all__ = ["compile_stop"]


def compile_stop(token_bytes: TokenBytes, text: str = "</answer>") -> UInt8[np.ndarray, "states v"]:
    """A table that a sampler steps by whole tokens: `state = table[state, token]`, from state 0.

    A state is how many bytes of `text` the sampled bytes end in; the last one, `len(table) - 1`, means that
    `text` has occurred and is never left. Tokens without bytes keep the state.

    Raises ValueError if `text` is empty or longer than 254 bytes.
    """
    word = text.encode()
    if not 0 < len(word) < 255:
        raise ValueError(f"a stop string has 1 to 254 bytes, not {len(word)}")
    by_byte = _match_table(word)  # [states, 256]
    starts = token_bytes.offsets[:-1]
    lengths = np.diff(token_bytes.offsets)
    # Longest tokens first: those that still have a byte at a position are then a prefix.
    order = np.argsort(-lengths, kind="stable")
    state = np.repeat(np.arange(len(word) + 1, dtype=np.uint8)[:, None], len(lengths), axis=1)
    longest = int(lengths.max(initial=0))
    active = np.searchsorted(-lengths[order], -np.arange(longest), side="left")
    for position, count in enumerate(active):
        byte = token_bytes.data[starts[order[:count]] + position]
        state[:, :count] = by_byte[state[:, :count], byte[None, :]]
    table = np.empty_like(state)
    table[:, order] = state
    return table


def _match_table(word: bytes) -> UInt8[np.ndarray, "states 256"]:
    """Knuth-Morris-Pratt as a full transition table; the last state is absorbing."""
    table = np.zeros((len(word) + 1, 256), np.uint8)
    table[0, word[0]] = 1
    fallback = 0  # the state after word[1:n], where a mismatch in state n continues
    for n in range(1, len(word)):
        table[n] = table[fallback]
        table[n, word[n]] = n + 1
        fallback = table[fallback, word[n]]
    table[-1] = len(word)
    return table
