"""Text on the device: a template compiled to tables of ids, and messages rendered from them by gathers.

A template compiles if its pieces never share a token: then the ids of a message are the ids of its
pieces, one after the other. Whether pieces share a token depends on the characters around a join, so
ids are cut out of an encoding of the piece between neighbours, and every kind of join is encoded and
compared before a table is handed out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from envs_jax.text import Literal, Template
from ragen_jax.text.joins import Piece, check_joins, encode_pieces
from ragen_jax.text.tokenizer import TextTokenizer
from ragen_jax.text.types import TemplateError

__all__ = ["RenderTables", "TemplateError", "compile_template", "render"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RenderTables:
    """A template as arrays: n ids, v values of all pieces together, p pieces.

    Value `i` of piece `q` is row `r = piece_rows[q] + i`; its ids are `ids[starts[r]:][:lengths[r]]`.
    """

    ids: Int[Array, "n"]
    starts: Int[Array, "v"]
    lengths: Int[Array, "v"]
    piece_rows: Int[Array, "p"]
    # Which slot a piece takes its value from (-1: a literal) and how many values it has.
    piece_slots: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    piece_sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # Bounds over all slot values of the number of tokens of a message.
    min_length: int = dataclasses.field(metadata={"static": True})
    max_length: int = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """How many indices a message takes."""
        return sum(slot >= 0 for slot in self.piece_slots)


def compile_template(
    template: Template,
    tokenizer: TextTokenizer,
    *,
    before: str = "",
    after: str = "",
    name: str = "template",
) -> RenderTables:
    """Compile a template for a tokenizer.

    Args:
      template: the whole message with its frame, e.g. `Template.of(frame.user_open, ..., frame.user_close)`.
      tokenizer: the tokenizer.
      before: text that always stands in front of the message; it is best cut at a special token.
      after: text that always follows, likewise.
      name: what errors call the template.

    Raises TemplateError if some joint of two pieces falls inside a token, or if a text is not what its
    tokens spell (a character that the tokenizer normalises away).
    """
    pieces = [
        Piece(f"the literal {part.text[:20]!r}", (part.text,))
        if isinstance(part, Literal)
        else Piece(f"slot {part.name!r}", part.values)
        for part in template.parts
    ]
    for piece in pieces:
        if not piece.values:
            raise TemplateError(f"{name}: {piece.name} has no values")
    framed = [Piece("the text before", (before,)), *pieces, Piece("the text after", (after,))]
    encoded = encode_pieces(framed, tokenizer, name=name)
    check_joins(framed, encoded, tokenizer, name=name)

    slot_numbers = iter(range(len(template.slots)))
    piece_slots = tuple(-1 if isinstance(p, Literal) else next(slot_numbers) for p in template.parts)
    return _pack(encoded[1:-1], piece_slots)


def _pack(encoded: Sequence[tuple[tuple[int, ...], ...]], piece_slots: tuple[int, ...]) -> RenderTables:
    """Lay pieces out flat; pieces with the same ids (the rows of a board) share their rows."""
    encoded = encoded or [((),)]  # an empty template is one empty piece
    piece_slots = piece_slots or (-1,)
    values: list[tuple[int, ...]] = []
    first_row: dict[tuple[tuple[int, ...], ...], int] = {}
    for piece in encoded:
        if piece not in first_row:
            first_row[piece] = len(values)
            values.extend(piece)
    lengths = np.asarray([len(value) for value in values], np.int32)
    ids = [token for value in values for token in value] or [0]  # a gather needs something to read
    return RenderTables(
        ids=jnp.asarray(np.asarray(ids, np.int32)),
        starts=jnp.asarray((np.cumsum(lengths) - lengths).astype(np.int32)),
        lengths=jnp.asarray(lengths),
        piece_rows=jnp.asarray(np.asarray([first_row[piece] for piece in encoded], np.int32)),
        piece_slots=piece_slots,
        piece_sizes=tuple(len(piece) for piece in encoded),
        min_length=sum(min(len(value) for value in piece) for piece in encoded),
        max_length=sum(max(len(value) for value in piece) for piece in encoded),
    )


def render(
    tables: RenderTables, slots: Int[Array, "b s"], width: int
) -> tuple[Int[Array, "b width"], Int[Array, "b"]]:
    """Ids of one message a row, padded on the left with id 0, and their number.

    The message of row `b` is `ids[b, width - length[b]:]`. An index outside its slot is clipped.
    Raises ValueError if a message could be longer than `width`.
    """
    chex.assert_shape(slots, (None, tables.num_slots))
    if width < tables.max_length:
        raise ValueError(f"messages have up to {tables.max_length} tokens, the width is {width}")
    rows = tables.piece_rows[None, :] + _piece_values(tables, slots)  # [b, p]
    lengths = tables.lengths[rows]
    ends = jnp.cumsum(lengths, axis=1)
    total = ends[:, -1]

    # Position of an output column in the message; negative in the padding.
    position = jnp.arange(width)[None, :] - (width - total)[:, None]
    # The piece of a position: as many as end at or before it. Empty pieces are passed over.
    piece = jnp.sum(position[:, :, None] >= ends[:, None, :], axis=-1)
    shift = tables.starts[rows] - (ends - lengths)  # from a position to its place in the flat ids
    source = jnp.take_along_axis(shift, piece, axis=1, mode="clip") + position
    ids = jnp.take(tables.ids, source, mode="clip")
    return jnp.where(position >= 0, ids, 0), total


def _piece_values(tables: RenderTables, slots: Int[Array, "b s"]) -> Int[Array, "b p"]:
    """Index of the value that each piece shows."""
    if not tables.num_slots:
        return jnp.zeros((slots.shape[0], len(tables.piece_slots)), jnp.int32)
    piece_slots = np.asarray(tables.piece_slots)
    values = jnp.where((piece_slots >= 0)[None, :], slots[:, np.maximum(piece_slots, 0)], 0)
    return jnp.clip(values, 0, (np.asarray(tables.piece_sizes) - 1)[None, :]).astype(jnp.int32)
