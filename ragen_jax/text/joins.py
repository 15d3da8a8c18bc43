"""Ids of the pieces of a template, cut out of encodings in context, and the proof that they join.

Every check compares ids with those the tokenizer gives to the joined text:

- all values of a piece, between the first (non-empty) values of its neighbours;
- for two pieces that can touch, one pair of values for every distinct pair of the last two characters
  on the left and the first two on the right; pieces touch across others that may be empty;
- a fixed random sample of whole messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ragen_jax.text.tokenizer import TextTokenizer
from ragen_jax.text.types import TemplateError

__all__ = ["Piece", "check_joins", "encode_pieces"]

_WINDOW = 16  # characters of context; byte-level pre-tokenizers look at far fewer
_EDGE = 2  # characters on each side that make a join what it is
_SAMPLES = 128

_Ids = tuple[int, ...]


class Piece(NamedTuple):
    """A literal (one value) or a slot. `name` is for messages."""

    name: str
    values: tuple[str, ...]

    @property
    def example(self) -> str:
        """The first value that is not empty, if any."""
        return next((value for value in self.values if value), "")


def encode_pieces(pieces: Sequence[Piece], tokenizer: TextTokenizer, *, name: str) -> list[tuple[_Ids, ...]]:
    """Ids of every value of every piece. Raises TemplateError where a value shares a token."""
    done: dict[tuple[str, tuple[str, ...], str], tuple[_Ids, ...]] = {}
    encoded: list[tuple[_Ids, ...]] = []
    for k, piece in enumerate(pieces):
        if piece.values == ("",):
            encoded.append(((),))
            continue
        left, right = _context(pieces, tokenizer, k, k)
        key = (left, piece.values, right)  # the middle rows of a board have the same surroundings
        if key not in done:
            batch = tokenizer.encode_batch([left + value + right for value in piece.values])
            values = []
            for value, ids in zip(piece.values, batch, strict=True):
                cut = _cut(tokenizer, ids, left, value, right)
                if cut is None:
                    around = [q.name for q in (*pieces[max(0, k - 1) : k], *pieces[k + 1 : k + 2])]
                    raise TemplateError(
                        f"{name}: {piece.name} does not tokenize apart from {' and '.join(around)}: "
                        f"{value!r} between {left[-16:]!r} and {right[:16]!r}"
                    )
                values.append(cut)
            done[key] = tuple(values)
        encoded.append(done[key])
    return encoded


def check_joins(
    pieces: Sequence[Piece],
    encoded: Sequence[tuple[_Ids, ...]],
    tokenizer: TextTokenizer,
    *,
    name: str,
) -> None:
    """Raise TemplateError unless joined values have the joined ids."""
    expected: dict[tuple[str, str, str], tuple[_Ids, str]] = {}
    for i, j in _touching(pieces):
        left, right = _context(pieces, tokenizer, i, j)
        lasts = _one_of_each((v[-_EDGE:], n) for n, v in enumerate(pieces[i].values) if v)
        firsts = _one_of_each((v[:_EDGE], n) for n, v in enumerate(pieces[j].values) if v)
        for m, n in itertools.product(lasts, firsts):
            text_m, text_n = pieces[i].values[m], pieces[j].values[n]
            ids = encoded[i][m] + encoded[j][n]
            where = f"{pieces[i].name} and {pieces[j].name}: {text_m[-24:]!r} and {text_n[:24]!r}"
            # The same text around the same ids need not be encoded again (cells of a wide board).
            key = (left, text_m + text_n, right)
            if expected.setdefault(key, (ids, where))[0] != ids:
                raise TemplateError(f"{name}: bad join between {where}")
    _compare(expected, tokenizer, name)

    rng = np.random.default_rng(0)
    whole: dict[tuple[str, str, str], tuple[_Ids, str]] = {}
    for _ in range(_SAMPLES if any(len(piece.values) > 1 for piece in pieces) else 1):
        choice = [int(rng.integers(len(piece.values))) for piece in pieces]
        texts = [piece.values[n] for piece, n in zip(pieces, choice, strict=True)]
        ids = tuple(token for values, n in zip(encoded, choice, strict=True) for token in values[n])
        shown = [
            f"{piece.name} = {text!r}"
            for piece, text in zip(pieces, texts, strict=True)
            if len(piece.values) > 1
        ]
        whole["", "".join(texts), ""] = (ids, ", ".join(shown) or "its literals")
    _compare(whole, tokenizer, name)


def _compare(
    expected: dict[tuple[str, str, str], tuple[_Ids, str]], tokenizer: TextTokenizer, name: str
) -> None:
    batch = tokenizer.encode_batch(["".join(key) for key in expected])
    for (key, (ids, where)), found in zip(expected.items(), batch, strict=True):
        if _cut(tokenizer, found, *key) != ids:
            raise TemplateError(f"{name}: bad join between {where}")


def _touching(pieces: Sequence[Piece]) -> Iterable[tuple[int, int]]:
    """Pairs of pieces with nothing but possibly empty pieces between them."""
    for i in range(len(pieces)):
        for j in range(i + 1, len(pieces)):
            yield i, j
            if "" not in pieces[j].values:
                break


def _one_of_each(keyed: Iterable[tuple[str, int]]) -> list[int]:
    firsts: dict[str, int] = {}
    for key, value in keyed:
        firsts.setdefault(key, value)
    return list(firsts.values())


def _context(pieces: Sequence[Piece], tokenizer: TextTokenizer, i: int, j: int) -> tuple[str, str]:
    """Text left of piece `i` and right of piece `j`: about `_WINDOW` characters of examples.

    No special token is cut in two, for it would be text then. On the left the cut is where no token can
    straddle it: after a newline that something visible follows, else before a single space.
    """
    left = "".join(piece.example for piece in pieces[:i])
    right = "".join(piece.example for piece in pieces[j + 1 :])
    start = _outside(left, max(0, len(left) - _WINDOW), tokenizer, after=False)
    stop = _outside(right, min(len(right), _WINDOW), tokenizer, after=True)
    if start:
        seams = range(start + 1, len(left) - 1)
        lines = (n for n in seams if left[n - 1] == "\n" and not left[n].isspace())
        words = (n for n in seams if left[n] == " " and not (left[n - 1].isspace() or left[n + 1].isspace()))
        start = next(itertools.chain(lines, words), start)
    return left[start:], right[:stop]


def _outside(text: str, cut: int, tokenizer: TextTokenizer, *, after: bool) -> int:
    """`cut`, or the end or start of the special token that it falls into."""
    for marker in tokenizer.special_texts:
        at = text.find(marker, max(0, cut - len(marker) + 1), cut + len(marker) - 1)
        if 0 <= at < cut < at + len(marker):
            return at + len(marker) if after else at
    return cut


def _cut(tokenizer: TextTokenizer, ids: Sequence[int], left: str, value: str, right: str) -> _Ids | None:
    """The ids of `value` among those of `left + value + right`.

    None if a token straddles a border, or if the tokens do not spell the text. Lengths in bytes serve as
    offsets: they are exact where a character is several tokens, and no tokenizer trims them.
    """
    start = len(left.encode())
    stop = start + len(value.encode())
    spelled = list(map(tokenizer.token_text, ids))
    if b"".join(spelled) != (left + value + right).encode():
        return None
    ends = [0, *itertools.accumulate(map(len, spelled))]
    # Tokens are never empty, so a border is where exactly one token ends, or is not found.
    if start not in ends or stop not in ends:
        return None
    return tuple(ids[ends.index(start) : ends.index(stop)])
