"""A Hugging Face tokenizer seen as tables of integers and bytes.

This is the only module that imports `transformers`. What the rest of the package needs of a tokenizer is
small: ids of a text, bytes of an id, the strings that frame a chat, and which ids may be sampled.
Only byte-level BPE tokenizers (GPT-2, Qwen, SmolLM, Llama 3) are accepted: their tokens are plain bytes,
so the text of a sequence of tokens is the concatenation of the tokens' bytes.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8
from tokenizers.models import BPE
from transformers import AutoTokenizer

from ragen_jax.text.frame import ChatFrame, derive_frame
from ragen_jax.text.types import TokenBytes, TokenizerError

__all__ = ["ChatFrame", "TextTokenizer", "TokenBytes", "TokenizerError", "load_tokenizer"]


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> TextTokenizer:
    """Load a tokenizer from a folder, from a hub id, or the packaged one by the name "tiny".

    Raises TokenizerError if nothing loads, if it is not a byte-level BPE, or if it has no usable chat
    template.
    """
    name = os.fspath(name_or_path)
    if name == "tiny":
        name = str(importlib.resources.files("ragen_jax") / "assets" / "tiny_tokenizer")
    elif Path(name).is_dir() and not (Path(name) / "tokenizer.json").is_file():
        raise TokenizerError(f"the folder {name!r} has no tokenizer.json")
    try:
        hf = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its own types
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise TokenizerError(f"cannot load a tokenizer from {name!r}: {reason}") from error
    return TextTokenizer(hf)


class _Vocabulary(NamedTuple):
    """Bytes of every id, and which ids are special."""

    text: list[bytes]  # what a token stands for in a text; for a special token its marker
    special: frozenset[int]


class TextTokenizer:
    """A byte-level BPE tokenizer with its chat frame.

    Attributes:
      hf: the fast tokenizer of `transformers`.
      vocab_size: number of ids, added tokens included. A model's head may have more rows.
      frame: the strings around the messages of a conversation.
      eot_id: the id of `frame.eot`, which ends an assistant message.
    """

    def __init__(self, hf: Any):
        """Wrap a fast tokenizer. Raises TokenizerError as `load_tokenizer` does."""
        self.hf = hf
        backend = getattr(hf, "backend_tokenizer", None)
        if (
            backend is None
            or not isinstance(backend.model, BPE)
            or backend.model.byte_fallback
            or "ByteLevel" not in repr(backend.pre_tokenizer)
        ):
            raise TokenizerError(f"{hf.name_or_path!r} is not a byte-level BPE tokenizer")
        self._backend = backend
        self.vocab_size: int = len(hf)
        self._vocabulary = _read_vocabulary(hf, self.vocab_size)
        markers = {self._vocabulary.text[i].decode(): i for i in self._vocabulary.special}
        self._markers = tuple(markers)
        self.frame: ChatFrame = derive_frame(hf, self._markers)
        self.eot_id: int = markers[self.frame.eot]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it are parsed, none are added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens written out; bytes that are not UTF-8 become U+FFFD."""
        text = self._vocabulary.text
        return b"".join(text[int(i)] for i in ids).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> bytes:
        """The bytes that a token stands for in a text; for a special token those of its marker."""
        return self._vocabulary.text[token_id]

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The markers of the special tokens."""
        return self._markers

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens (`<|im_start|>`, ...); `<think>` of Qwen3 is not one."""
        return self._vocabulary.special

    def byte_tables(self, model_vocab_size: int | None = None) -> TokenBytes:
        """Token id -> bytes as flat tables; special tokens and padded ids have none.

        Raises TokenizerError if the model has fewer rows than the tokenizer has ids.
        """
        size = self._rows(model_vocab_size)
        pieces = [b"" if i in self.special_ids else text for i, text in enumerate(self._vocabulary.text)]
        lengths = np.zeros(size, np.int64)
        lengths[: len(pieces)] = [len(piece) for piece in pieces]
        offsets: Int[np.ndarray, "v+1"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        data: UInt8[np.ndarray, "n"] = np.frombuffer(b"".join(pieces), np.uint8)
        return TokenBytes(data, offsets)

    def sampling_ban(self, model_vocab_size: int | None = None) -> Bool[np.ndarray, "v"]:
        """True for ids that must never be sampled.

        These are the special tokens other than `eot_id`, and the rows that pad a model's head. Added
        tokens that are not special, such as `<think>`, are text like any other.
        """
        ban = np.zeros(self._rows(model_vocab_size), np.bool_)
        ban[self.vocab_size :] = True
        ban[list(self.special_ids)] = True
        ban[self.eot_id] = False
        return ban

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer as Hugging Face files."""
        self.hf.save_pretrained(os.fspath(folder))

    def _rows(self, model_vocab_size: int | None) -> int:
        if model_vocab_size is None:
            return self.vocab_size
        if model_vocab_size < self.vocab_size:
            raise TokenizerError(
                f"the model has {model_vocab_size} token rows, its tokenizer {self.vocab_size} ids"
            )
        return model_vocab_size


def _read_vocabulary(hf: Any, size: int) -> _Vocabulary:
    # Byte-level vocabularies spell bytes as printable characters; going through latin-1 turns a
    # whole token at once.
    to_latin1 = {ord(char): byte for byte, char in enumerate(_byte_characters())}
    text: list[bytes] = [b""] * size
    added = hf.added_tokens_decoder
    for token, index in hf.get_vocab().items():
        if index in added:
            continue
        try:
            text[index] = token.translate(to_latin1).encode("latin-1")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"token {token!r} of {hf.name_or_path!r} is not spelled in bytes") from error
    for index, token in added.items():
        text[index] = token.content.encode()
    special = {index for index, token in added.items() if token.special} | set(hf.all_special_ids)
    return _Vocabulary(text, frozenset(special))


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte, by GPT-2's convention.

    Printable latin-1 bytes stand for themselves, the others for U+0100 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
