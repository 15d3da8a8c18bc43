"""Read actions out of sampled tokens on the device: one automaton over the bytes that the tokens spell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ragen_jax.text.grammar import EVENT_UNKNOWN, Automaton, ParsedText, build_automaton, parse_text
from ragen_jax.text.types import TokenBytes

__all__ = ["ParsedReply", "ParsedText", "ParserTables", "compile_parser", "parse", "parse_text"]


class ParsedReply(NamedTuple):
    """What `parse_text` says, for every row; rows that are not `found` have no actions."""

    actions: Int[Array, "b a"]  # in order, -1 behind the last
    num_actions: Int[Array, "b"]
    num_unknown: Int[Array, "b"]
    found: Bool[Array, "b"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParserTables:
    """The automaton and the tokens' bytes, these already as classes. s states, c classes of bytes."""

    classes: Int[Array, "n"]  # byte class of every byte of every token
    offsets: Int[Array, "v+1"]  # token i has classes[offsets[i]:offsets[i + 1]]
    transition: Int[Array, "s*c"]  # next state * events + event
    start: Int[Array, ""]
    final: Int[Array, ""]
    num_classes: int = dataclasses.field(metadata={"static": True})
    num_events: int = dataclasses.field(metadata={"static": True})
    max_actions: int = dataclasses.field(metadata={"static": True})


def compile_parser(
    actions: Sequence[str],
    *,
    separator: str = "||",
    max_actions: int,
    think: bool = True,
    token_bytes: TokenBytes,
    prefix: bytes | None = None,
) -> ParserTables:
    """Tables for `parse`.

    Args:
      actions: names in order, matched without case.
      separator: what stands between two actions.
      max_actions: how many pieces of the answer count; later ones are ignored.
      think: whether the language has a thought.
      token_bytes: of the tokenizer, with as many ids as the model's head has rows.
      prefix: what every reply begins with without being sampled; `<think>` (`<answer>`) if None.

    Raises ValueError for names or a separator that clash with the syntax.
    """
    if max_actions < 1:
        raise ValueError(f"max_actions is {max_actions}, it must be positive")
    automaton: Automaton = build_automaton(actions, separator=separator, think=think, prefix=prefix)
    num_states, num_classes = automaton.next_state.shape
    num_events = len(actions) + 2
    if num_states * num_events >= 2**31:
        raise ValueError(f"{len(actions)} actions make an automaton too large for int32")
    return ParserTables(
        classes=jnp.asarray(automaton.byte_class.astype(np.uint8)[token_bytes.data]),
        offsets=jnp.asarray(token_bytes.offsets),
        transition=jnp.asarray((automaton.next_state * num_events + automaton.event).reshape(-1)),
        start=jnp.asarray(automaton.start, jnp.int32),
        final=jnp.asarray(automaton.final, jnp.int32),
        num_classes=num_classes,
        num_events=num_events,
        max_actions=max_actions,
    )


class _Pointer(NamedTuple):
    """Where each row is: `byte` of `stop` in `tables.classes`, and the token column to read next."""

    byte: Int[Array, "b"]
    stop: Int[Array, "b"]
    column: Int[Array, "b"]


class _Scan(NamedTuple):
    pointer: _Pointer
    state: Int[Array, "b"]
    pieces: Int[Array, "b"]  # pieces of the answer that were not empty
    reply: ParsedReply


def parse(tables: ParserTables, tokens: Int[Array, "b t"], lengths: Int[Array, "b"]) -> ParsedReply:
    """Parse the sampled part of replies, `tokens[b, :lengths[b]]`; the forced prefix is in the tables.

    Equals `parse_text` of the prefix and the tokens' bytes. Special tokens have no bytes and are skipped.
    """
    chex.assert_rank([tokens, lengths], [2, 1])
    rows, columns = tokens.shape
    begins = jnp.take(tables.offsets, tokens, mode="clip")
    ends = jnp.take(tables.offsets, tokens + 1, mode="clip")
    lengths = jnp.minimum(lengths, columns)

    def read(column: Int[Array, "b"]) -> _Pointer:
        """Point at a token; behind the last, at nothing."""
        at = jnp.minimum(column, columns - 1)[:, None]
        byte = jnp.take_along_axis(begins, at, axis=1)[:, 0]
        stop = jnp.take_along_axis(ends, at, axis=1)[:, 0]
        return _Pointer(byte, jnp.where(column < lengths, stop, byte), column + 1)

    def unfinished(scan: _Scan) -> Bool[Array, ""]:
        # A row is done when its tokens are used up or the automaton is in its final state.
        pointer = scan.pointer
        more = (pointer.byte < pointer.stop) | (pointer.column < lengths)
        return jnp.any(more & (scan.state != tables.final))

    def step(scan: _Scan) -> _Scan:
        pointer, state, reply = scan.pointer, scan.state, scan.reply
        has_byte = pointer.byte < pointer.stop  # not so at a token without bytes, and at the end
        byte_class = jnp.take(tables.classes, pointer.byte, mode="clip").astype(jnp.int32)
        move = jnp.take(tables.transition, state * tables.num_classes + byte_class, mode="clip")
        state = jnp.where(has_byte, move // tables.num_events, state)
        event = jnp.where(has_byte, move % tables.num_events, 0)

        counts = (event > 0) & (scan.pieces < tables.max_actions)
        is_action = counts & (event > EVENT_UNKNOWN)
        here = jnp.arange(tables.max_actions)[None, :] == reply.num_actions[:, None]
        actions = jnp.where(here & is_action[:, None], (event - EVENT_UNKNOWN - 1)[:, None], reply.actions)
        reply = reply._replace(
            actions=actions,
            num_actions=reply.num_actions + is_action,
            num_unknown=reply.num_unknown + (counts & (event == EVENT_UNKNOWN)),
        )
        advanced = pointer._replace(byte=pointer.byte + has_byte)
        used_up = advanced.byte >= advanced.stop
        pointer = jax.tree.map(lambda new, old: jnp.where(used_up, new, old), read(pointer.column), advanced)
        return _Scan(pointer, state, scan.pieces + counts, reply)

    zeros = jnp.zeros(rows, jnp.int32)
    nothing = ParsedReply(
        jnp.full((rows, tables.max_actions), -1, jnp.int32), zeros, zeros, jnp.zeros(rows, bool)
    )
    if not columns:
        return nothing
    state = jnp.broadcast_to(tables.start, (rows,))
    scan = jax.lax.while_loop(unfinished, step, _Scan(read(zeros), state, zeros, nothing))

    found = scan.state == tables.final
    return ParsedReply(
        actions=jnp.where(found[:, None], scan.reply.actions, -1),
        num_actions=jnp.where(found, scan.reply.num_actions, 0),
        num_unknown=jnp.where(found, scan.reply.num_unknown, 0),
        found=found,
    )
