"""Types shared by the text modules; importing them loads neither JAX nor `transformers`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from ragen_jax.errors import UserError

__all__ = ["TemplateError", "TokenBytes", "TokenizerError"]


class TokenizerError(UserError):
    """A tokenizer that cannot be loaded or used; the message says why in one sentence."""


class TemplateError(UserError):
    """A template whose parts do not join for a tokenizer; the message names the slot and the strings."""


class TokenBytes(NamedTuple):
    """Bytes of every token id: those of id `i` are `data[offsets[i]:offsets[i + 1]]`."""

    data: UInt8[np.ndarray, "n"]
    offsets: Int[np.ndarray, "v+1"]
