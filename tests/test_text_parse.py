"""The device parser against the regular expression, on hostile bytes split into tokens at random."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.text.parse import compile_parser, parse, parse_text
from ragen_jax.text.types import TokenBytes
from tests.tokenizers import get_tokenizer

TOKENS, ROWS = 96, 8
parse_jit = jax.jit(parse)

# Fragments that hold or almost hold the syntax, also as single tokens.
FRAGMENTS = [
    *(b"<think>", b"</think>", b"<answer>", b"</answer>", b"</think><answer>", b"</think> \n<answer>"),
    *(b"<think>x</think><answer>Left||Up</answer>", b"<answer>", b"</answer>", b"||", b"||", b" || "),
    *(b"<", b"</", b"</answer", b"answer>", b"</thin", b"think>", b"<answer", b">", b"|", b"|||", b"<|"),
    *(b" ", b"\n", b"\t\r\x0b\x0c", b"\x1c", b"\xc2\xa0", b"\x00", b"\xff", b"\xc3"),
    *(
        b"Left",
        b"left",
        b"LEFT",
        b" Right",
        b"up",
        b"Down ",
        b"Lef",
        b"t",
        b"side",
        b"Left Side",
        b"left  side",
    ),
    *(b"do|it", b"do|", b"it", b"Ab", b"aab", b"a", b"b", b"x", b"none"),
]
ACTIONS = ("Left", "Right", "Up", "Down", "Left side", "do|it", "leftover")
GRAMMARS = {
    "plain": {"actions": ACTIONS[:4]},
    "shared prefixes": {"actions": ACTIONS},
    "answer only": {"actions": ACTIONS, "think": False},
    "cap": {"actions": ACTIONS, "max_actions": 1},
    "separator that overlaps itself": {"actions": ("left", "b"), "separator": "aab"},
    "upper-case separator": {"actions": ("sa", "left", "sand"), "separator": "AB"},
    "separator that continues a tag": {"actions": ("left", "up"), "separator": "r!"},
}


def token_table() -> TokenBytes:
    """256 byte tokens, the fragments, and one token without bytes (as special tokens are)."""
    pieces = [bytes([byte]) for byte in range(256)] + FRAGMENTS + [b""]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    return TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), offsets.astype(np.int32))


@functools.cache
def tables_for(name: str, whole: bool):
    arguments = {"max_actions": 3, "separator": "||", "think": True, **GRAMMARS[name]}
    prefix = b"" if whole else None
    return arguments, compile_parser(**arguments, token_bytes=token_table(), prefix=prefix)


def spell(ids: list[int]) -> bytes:
    data, offsets = token_table()
    return b"".join(data[offsets[i] : offsets[i + 1]].tobytes() for i in ids)


def check(name: str, whole: bool, replies: list[list[int]]) -> list[bool]:
    arguments, tables = tables_for(name, whole)
    tokens = np.full((ROWS, TOKENS), 256 + FRAGMENTS.index(b"</answer>"), np.int32)  # not to be read
    lengths = np.zeros(ROWS, np.int32)
    for row, ids in enumerate(replies):
        ids = ids[:TOKENS]
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    got = jax.device_get(parse_jit(tables, tokens, lengths))
    prefix = b"" if whole else b"<think>" if arguments["think"] else b"<answer>"
    for row, ids in enumerate(replies):
        text = prefix + spell(ids[:TOKENS])
        want = parse_text(text, **arguments)
        seen = tuple(got.actions[row, : got.num_actions[row]].tolist())
        assert (seen, got.num_unknown[row], got.found[row]) == want, text
        assert (got.actions[row, got.num_actions[row] :] == -1).all()
    return got.found[: len(replies)].tolist()


fragment_tokens = st.integers(256, 256 + len(FRAGMENTS)).map(lambda i: [i])
spelled_out = st.sampled_from(FRAGMENTS).map(list)  # the same bytes, one token each
reply_ids = st.lists(fragment_tokens | spelled_out | st.integers(0, 255).map(lambda i: [i]), max_size=30).map(
    lambda parts: [token for part in parts for token in part]
)
# Hostile content inside well-formed tags, so that answers are reached.
inside = st.tuples(reply_ids, reply_ids).map(
    lambda pair: [*pair[0][:20], *b"</think>\n<answer>", *pair[1][:40], *b"</answer>"]
)


@pytest.mark.parametrize("name", GRAMMARS)
def test_parse_equals_the_regular_expression(name):
    found = []

    @settings(max_examples=30, derandomize=True, deadline=None, database=None)
    @given(st.booleans(), st.lists(reply_ids | inside, min_size=ROWS, max_size=ROWS))
    def run(whole, replies):
        if whole:
            opening = b"<think>" if GRAMMARS[name].get("think", True) else b""
            replies = [[*opening, *ids] if row % 2 else ids for row, ids in enumerate(replies)]
        found.extend(check(name, whole, replies))

    run()
    assert sum(found) > 20  # the property is not about failures alone


@pytest.mark.parametrize(
    ("text", "actions", "num_unknown", "found"),
    [
        ("<think>a</think><answer>Left</answer>", (0,), 0, True),
        ("<think>a</think>\n <answer>left||RIGHT || up</answer>", (0, 1, 2), 0, True),
        ("<think></think><answer> || |||| </answer>", (), 0, True),
        ("<think></think><answer>Left || jump || Down</answer>", (0, 3), 1, True),
        ("<think></think><answer>jump || Up || Up || Left</answer>", (2, 2), 1, True),  # cut, then dropped
        ("<think>a</think>b</think><answer>Up</answer>", (2,), 0, True),
        ("<think>a</think>b<answer>Up</answer>", (), 0, False),
        ("<answer>Up</answer>", (), 0, False),
        ("<think></think><answer>Up<answer>Up</answer>", (), 1, True),
        ("<think></think><answer>Up", (), 0, False),
        ("<think></think><answer>Up</answer><think></think><answer>Down</answer>", (2,), 0, True),
        ("<Think></Think><answer>Up</answer>", (), 0, False),
    ],
)
def test_parse_text_examples(text, actions, num_unknown, found):
    assert parse_text(text, ACTIONS[:4], max_actions=3) == (actions, num_unknown, found)
    tables = compile_parser(ACTIONS[:4], max_actions=3, token_bytes=token_table(), prefix=b"")
    tokens = np.zeros((ROWS, TOKENS), np.int32)
    tokens[:, : len(text)] = list(text.encode())
    got = jax.device_get(parse_jit(tables, tokens, np.full(ROWS, len(text), np.int32)))
    assert tuple(got.actions[0, : got.num_actions[0]].tolist()) == actions
    assert (got.num_unknown[0], got.found[0]) == (num_unknown, found)


def test_actions_read_from_a_real_reply():
    tokenizer = get_tokenizer("tiny")
    tables = compile_parser(
        ACTIONS[:4], max_actions=5, token_bytes=tokenizer.byte_tables(tokenizer.vocab_size + 11)
    )
    ids = tokenizer.encode("goal: down left</think><answer>Down || Left</answer><|im_end|>")
    got = jax.device_get(jax.jit(parse)(tables, np.asarray([ids]), np.asarray([len(ids)])))
    assert got.actions.tolist() == [[3, 0, -1, -1, -1]]
    assert (got.num_actions[0], got.num_unknown[0], got.found[0]) == (2, 0, True)


def test_no_columns():
    got = parse(tables_for("plain", False)[1], np.zeros((2, 0), np.int32), np.zeros(2, np.int32))
    assert not got.found.any()
    assert (got.actions == -1).all()


def test_one_trace_for_all_contents():
    traces = 0

    @jax.jit
    def counted(tables, tokens, lengths):
        nonlocal traces
        traces += 1
        return parse(tables, tokens, lengths)

    tables = tables_for("plain", False)[1]
    for length in (0, 3):
        counted(tables, np.full((2, 4), length, np.int32), np.full(2, length, np.int32))
    assert traces == 1


def test_hundreds_of_names_compile_to_a_small_automaton():
    names = [f"({row}, {column}, {value})" for row in range(5) for column in range(5) for value in range(6)]
    tables = compile_parser(names, max_actions=2, token_bytes=token_table())
    states = tables.transition.shape[0] // tables.num_classes
    assert states < 2_500
    text = b"</think><answer>(4, 0, 3)||(0,0,0)</answer>"
    tokens = np.zeros((ROWS, TOKENS), np.int32)
    tokens[:, : len(text)] = list(text)
    got = jax.device_get(parse_jit(tables, tokens, np.full(ROWS, len(text), np.int32)))
    assert got.actions[0].tolist() == [names.index("(4, 0, 3)"), -1]
    assert got.num_unknown[0] == 1


@pytest.mark.parametrize(
    ("actions", "separator", "message"),
    [
        (["Up"], "", "empty"),
        (["Up"], "| |", "white space"),
        (["Up"], "<", "'<'"),
        (["Up"], "/", "part of"),
        (["Up||"], "||", "contains the separator"),
        (["<Up"], "||", "contains the separator"),
        ([" Up"], "||", "white space around"),
        ([""], "||", "empty"),
        (["Up", "UP"], "||", "but for case"),
    ],
)
def test_bad_grammars_are_refused(actions, separator, message):
    with pytest.raises(ValueError, match=message):
        parse_text("", actions, separator=separator, max_actions=1)
    with pytest.raises(ValueError, match=message):
        compile_parser(actions, separator=separator, max_actions=1, token_bytes=token_table())
