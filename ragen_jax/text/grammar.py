"""The language of replies: a reference parser on the host, and a byte automaton that does the same.

A reply is `<think>(.*?)</think>\\s*<answer>(.*?)</answer>`, or `<answer>(.*?)</answer>` without thinking,
in bytes: the first match anywhere, white space and case as in ASCII. The answer is split at the separator,
pieces are stripped, empty ones are dropped, the list is cut to the cap, and then names that are not
actions are counted and dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

__all__ = ["EVENT_NONE", "EVENT_UNKNOWN", "Automaton", "ParsedText", "build_automaton", "parse_text"]

THINK, THINK_END, ANSWER, ANSWER_END = b"<think>", b"</think>", b"<answer>", b"</answer>"
WHITESPACE = b" \t\n\r\x0b\x0c"  # bytes.strip() and \s in a bytes pattern

# What a byte completes; action k is event k + 2.
EVENT_NONE, EVENT_UNKNOWN = 0, 1


class ParsedText(NamedTuple):
    """`actions` are indices in order; if `found` is False there are none."""

    actions: tuple[int, ...]
    num_unknown: int
    found: bool


class Automaton(NamedTuple):
    """A byte automaton whose transitions report the answer's pieces as they end.

    s states, c classes of bytes that no state tells apart. State `final` is absorbing: a reply was read.
    """

    byte_class: Int[np.ndarray, "256"]
    next_state: Int[np.ndarray, "s c"]
    event: Int[np.ndarray, "s c"]
    start: int
    final: int


def parse_text(
    text: bytes | str,
    actions: Sequence[str],
    *,
    separator: str = "||",
    max_actions: int,
    think: bool = True,
) -> ParsedText:
    """Read the actions out of a whole reply, its forced first tag included.

    Raises ValueError for names or a separator that the language cannot have.
    """
    names, separator_bytes = check_grammar(actions, separator)
    data = text.encode() if isinstance(text, str) else text
    pattern = rb"<answer>(.*?)</answer>"
    if think:
        pattern = rb"<think>(.*?)</think>\s*" + pattern
    match = re.search(pattern, data, re.DOTALL)
    if match is None:
        return ParsedText((), 0, False)
    stripped = [piece.strip() for piece in match.group(match.lastindex or 0).split(separator_bytes)]
    pieces = [piece.lower() for piece in stripped if piece][:max_actions]
    known = tuple(names.index(piece) for piece in pieces if piece in names)
    return ParsedText(known, len(pieces) - len(known), True)


def check_grammar(actions: Sequence[str], separator: str) -> tuple[list[bytes], bytes]:
    """The names in lower-case bytes and the separator in bytes; ValueError if they clash with the syntax."""
    sep = separator.encode()
    if not sep:
        raise ValueError("the action separator is empty")
    if any(byte in WHITESPACE + b"<>" for byte in sep):
        raise ValueError(f"the action separator {separator!r} contains white space, '<' or '>'")
    if sep in ANSWER_END:
        raise ValueError(f"the action separator {separator!r} is a part of {ANSWER_END.decode()!r}")
    names = [name.encode().lower() for name in actions]
    for name, raw in zip(actions, names, strict=True):
        if not raw or raw != raw.strip():
            raise ValueError(f"the action name {name!r} is empty or has white space around it")
        if sep in raw or b"<" in raw:
            raise ValueError(f"the action name {name!r} contains the separator {separator!r} or '<'")
    if len(set(names)) < len(names):
        raise ValueError(f"action names are the same but for case: {', '.join(actions)}")
    return names, sep


# A state is (phase, ...) of plain values, so that equal states are equal keys:
#   ("seek", matched)          before the answer: how much of the opening tags the text ends in
#   ("answer", piece, pending) piece: see `_Grammar.feed_piece`; pending: bytes that may yet become the
#                              separator or the closing tag
#   ("final",)
_State = tuple


class _Grammar:
    """The automaton's transition function, incremental and readable; `build_automaton` tabulates it."""

    def __init__(self, names: Sequence[bytes], separator: bytes, think: bool):
        self.names = {name: k for k, name in enumerate(names)}
        self.prefixes = {name[:n] for name in names for n in range(len(name) + 1)}
        self.separator = separator
        self.opening = [THINK, THINK_END + ANSWER] if think else [ANSWER]
        self.settled: dict[bytes, tuple[bytes, bytes | None, bytes]] = {}

    def step(self, state: _State, byte: int) -> tuple[_State, int]:
        """The next state and the event of one byte."""
        if state[0] == "final":
            return state, EVENT_NONE
        if state[0] == "seek":
            return self._seek(state[1], state[2], byte), EVENT_NONE
        return self._answer(state[1], state[2], byte)

    def _seek(self, tag: int, matched: bytes, byte: int) -> _State:
        # The two tags THINK_END and ANSWER are sought as one word that may have white space in its
        # middle, which is left out of `matched`.
        word = self.opening[tag]
        if matched == THINK_END and byte in WHITESPACE:
            return ("seek", tag, matched)
        matched += bytes([byte])
        while not word.startswith(matched):
            matched = matched[1:]
        if matched != word:
            return ("seek", tag, matched)
        return ("seek", tag + 1, b"") if tag + 1 < len(self.opening) else ("answer", b"", b"")

    def _answer(self, piece: bytes | int, pending: bytes, byte: int) -> tuple[_State, int]:
        text, end, pending = self._settle(pending + bytes([byte]))
        for released in text:
            if piece == -1:
                break
            piece = self.feed_piece(piece, released)
        if end is not None:
            state: _State = ("final",) if end == ANSWER_END else ("answer", b"", b"")
            return state, self._piece_event(piece)
        if pending and isinstance(piece, bytes) and piece + pending[:1].lower() not in self.prefixes:
            # If the pending bytes turn out to be text, the piece is unknown whatever it was, so only
            # its value as it stands matters; this keeps names and tags from multiplying.
            piece = self._outcome(piece)
        return ("answer", piece, pending), EVENT_NONE

    def _settle(self, pending: bytes) -> tuple[bytes, bytes | None, bytes]:
        """Split pending bytes into text, the separator or tag that they complete, and what stays open.

        Only the last byte is new, and no separator fits in the tag: what is completed ends the bytes.
        """
        if pending not in self.settled:
            text, end, rest = b"", None, pending
            while rest:
                if rest in (ANSWER_END, self.separator):
                    end, rest = rest, b""
                elif self.separator.startswith(rest) or ANSWER_END.startswith(rest):
                    break
                else:
                    text, rest = text + rest[:1], rest[1:]
            self.settled[pending] = (text, end, rest)
        return self.settled[pending]

    def feed_piece(self, piece: bytes | int, byte: int) -> bytes | int:
        """Append a byte to a piece.

        A piece is its text (in lower case, stripped on the left) while a name begins like it, else the
        index of the name that it is, if only white space follows, else -1: unknown.
        """
        space = byte in WHITESPACE
        if isinstance(piece, int):
            return piece if space else -1
        if space and not piece:
            return piece
        text = piece + bytes([byte]).lower()
        if text in self.prefixes:
            return text
        return self._outcome(piece) if space else -1

    def _outcome(self, piece: bytes) -> bytes | int:
        return self.names.get(piece.rstrip(WHITESPACE), -1) if piece else piece

    def _piece_event(self, piece: bytes | int) -> int:
        outcome = self._outcome(piece) if isinstance(piece, bytes) else piece
        return EVENT_NONE if isinstance(outcome, bytes) else outcome + 2


def build_automaton(
    actions: Sequence[str], *, separator: str = "||", think: bool = True, prefix: bytes | None = None
) -> Automaton:
    """Tabulate the language.

    Args:
      actions: names, in order.
      separator: what stands between two actions.
      think: whether a reply starts with a thought.
      prefix: bytes that every reply begins with and that are not sampled; the automaton starts behind
        them; the opening tag if None. It changes nothing but `start`.

    Raises ValueError as `parse_text` does.
    """
    names, sep = check_grammar(actions, separator)
    grammar = _Grammar(names, sep, think)
    # Bytes that occur nowhere in the syntax act alike.
    syntax = THINK + THINK_END + ANSWER + ANSWER_END + WHITESPACE + sep + b"".join(names)
    distinct = sorted({*syntax, *syntax.upper()})
    other = 0xFF  # not in UTF-8, so in no name
    symbols = [*distinct, other]

    opening: _State = ("seek", 0, b"")
    index = {opening: 0}
    queue = [opening]
    rows: list[list[tuple[int, int]]] = []
    for current in queue:  # grows as new states are met
        row = []
        for byte in symbols:
            following, event = grammar.step(current, byte)
            if following not in index:
                index[following] = len(queue)
                queue.append(following)
            row.append((index[following], event))
        rows.append(row)
    table = np.asarray(rows, np.int32)  # [s, symbols, 2]

    columns, inverse = np.unique(
        table.transpose(1, 0, 2).reshape(len(symbols), -1), axis=0, return_inverse=True
    )
    classes = columns.reshape(len(columns), len(rows), 2)
    byte_class = np.full(256, inverse.reshape(-1)[-1], np.int32)
    byte_class[distinct] = inverse.reshape(-1)[:-1]
    start = opening
    for byte in (THINK if think else ANSWER) if prefix is None else prefix:
        start, event = grammar.step(start, byte)
        if event != EVENT_NONE or start == ("final",):
            raise ValueError(f"the forced prefix {prefix!r} of a reply already contains an action")
    return Automaton(
        byte_class=byte_class,
        next_state=np.ascontiguousarray(classes[:, :, 0].T),
        event=np.ascontiguousarray(classes[:, :, 1].T),
        start=index[start],
        final=index[("final",)],
    )
