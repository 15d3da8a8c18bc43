"""The stop table against `bytes.find`."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.text.stop import compile_stop
from ragen_jax.text.types import TokenBytes
from tests.tokenizers import get_tokenizer

PIECES = [b"", b"<", b"/", b"</", b"an", b"swer", b">", b"</answer", b"answer>", b"</answer>", b"x</answer>y",
          b"a", b"b", b"ab", b"aab", b"aa", b"aabaa", b"</</answer"]  # fmt: skip


@functools.cache
def stop_table(word: str):
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in PIECES])]).astype(np.int32)
    return compile_stop(TokenBytes(np.frombuffer(b"".join(PIECES), np.uint8), offsets), word)


@pytest.mark.parametrize("word", ["</answer>", "aabaab", "a", "aa"])
def test_stop_is_find(word):
    @settings(max_examples=200, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
    def run(tokens):
        table = stop_table(word)
        assert table.dtype == np.uint8
        assert table.shape == (len(word) + 1, len(PIECES))
        state, text = 0, b""
        for token in tokens:
            state = table[state, token]
            text += PIECES[token]
            assert (state == len(table) - 1) == (text.find(word.encode()) >= 0)

    run()


@pytest.mark.parametrize("name", ["tiny", "qwen2_5"])
def test_stop_with_a_real_vocabulary(name):
    tokenizer = get_tokenizer(name)
    table = compile_stop(tokenizer.byte_tables(tokenizer.vocab_size + 271))
    assert table.shape == (10, tokenizer.vocab_size + 271)
    # The tag as the tokenizer spells it, byte by byte, and inside a message with its end-of-turn token.
    spelled = [tokenizer.encode("</answer>"), [t for c in "</answer>" for t in tokenizer.encode(c)]]
    for ids in (*spelled, tokenizer.encode("<answer>Left</answer><|im_end|>")):
        state = 0
        for token in ids:
            state = table[state, token]
        assert state == 9
    state = 0
    for token in tokenizer.encode("</answer><|im_end|>Left</answer"):
        state = table[state, token]
    assert state == 9  # sticky
    assert table[3, tokenizer.eot_id] == 3  # no bytes, no change
    assert (table[:, -1] == np.arange(10)).all()


@pytest.mark.parametrize("word", ["", "x" * 255])
def test_bad_stop_strings(word):
    with pytest.raises(ValueError, match="1 to 254 bytes"):
        stop_table(word)
