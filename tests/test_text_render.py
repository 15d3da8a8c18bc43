"""Rendered ids are the tokenizer's ids of the whole message, and templates that cannot join are refused."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs_jax.text import Slot, Template
from ragen_jax.text.render import TemplateError, compile_template, render
from ragen_jax.text.tokenizer import TextTokenizer
from tests.tokenizers import NAMES, get_tokenizer

ROWS = 16
render_jit = jax.jit(render, static_argnames="width")

SOKOBAN_ROW = tuple("".join(cells) + "\n" for cells in itertools.product("#_OX√PS", repeat=3))
LAKE_ROW = tuple("".join(cells) + "\n" for cells in itertools.product("P_OGX√", repeat=4))
WIDE_CELL = tuple(f" {cell}" for cell in "#_OX√PS")
WIDE_END = tuple(f" {cell}\n" for cell in "#_OX√PS")  # "#\n" is one token of Qwen's


def message(tokenizer: TextTokenizer, kind: str) -> Template:
    frame = tokenizer.frame
    numbers = Slot("turn", tuple(str(n) for n in range(1, 12)))
    reward = Slot("reward", ("", *(f"Reward: {n / 10:.1f}\n" for n in range(-20, 120, 7))))
    board = {
        "sokoban": [Slot(f"row{i}", SOKOBAN_ROW) for i in range(6)],
        "lake": [Slot(f"row{i}", LAKE_ROW) for i in range(4)],
        "wide": [part for _ in range(3) for part in (*[Slot("cell", WIDE_CELL)] * 9, Slot("end", WIDE_END))],
        "bandit": [
            "Arms:",
            Slot("a", (" Phoenix", " Dragon", " StartupFounder")),
            " or",
            Slot("b", (" A", " Élan")),
            "\n",
        ],
    }[kind]
    left = Slot("left", tuple(f" {n}" for n in range(11)))
    hint = Slot("hint", (".\n", ". Be brief.\n", ". Take\nyour time.\n"))
    return Template.of(
        *(frame.user_open + "Turn ", numbers, ".\n", reward, "State:\n", *board),
        *("You have", left, " actions left", hint, "Answer:" + frame.user_close + "<think>"),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["sokoban", "lake", "wide", "bandit"])
def test_rendered_ids_are_the_tokenizers(name, kind):
    tokenizer = get_tokenizer(name)
    template = message(tokenizer, kind)
    tables = compile_template(template, tokenizer, before=tokenizer.frame.eot, name=kind)
    width = tables.max_length + 3
    sizes = [len(slot.values) for slot in template.slots]
    seen: set[int] = set()

    @settings(max_examples=10, derandomize=True, deadline=None, database=None)
    @given(st.integers(0, 2**32 - 1))
    def run(seed):
        rng = np.random.default_rng(seed)
        slots = np.stack([rng.integers(size, size=ROWS) for size in sizes], axis=1)
        ids, lengths = jax.device_get(render_jit(tables, slots, width=width))
        for row in range(ROWS):
            length = int(lengths[row])
            assert ids[row, width - length :].tolist() == tokenizer.encode(template.render_text(slots[row]))
            assert not ids[row, : width - length].any()
            assert tables.min_length <= length <= tables.max_length
            seen.add(length)

    run()
    assert len(seen) > 1 or kind == "lake"


def test_lengths_are_exact_bounds_and_values_differ_in_length():
    tokenizer = get_tokenizer("tiny")
    template = Template.of("Turn", Slot("x", ("", " left", " left left")), ".\n")
    tables = compile_template(template, tokenizer)
    assert (tables.min_length, tables.max_length) == (2, 4)  # ".\n" is one token
    ids, lengths = render(tables, np.asarray([[0], [1], [2], [9], [-1]]), 5)
    assert lengths.tolist() == [2, 3, 4, 4, 2]  # an index outside its slot is clipped
    assert ids[0].tolist() == [0, 0, 0, *tokenizer.encode("Turn.\n")]
    assert ids[2].tolist() == ids[3].tolist() == [0, *tokenizer.encode("Turn left left.\n")]


def test_without_slots_and_empty():
    tokenizer = get_tokenizer("tiny")
    tables = compile_template(Template.of("State:\n"), tokenizer)
    want = tokenizer.encode("State:\n")
    ids, lengths = render(tables, np.zeros((2, 0), np.int32), 6)
    assert ids.tolist() == [[0] * (6 - len(want)) + want] * 2
    assert lengths.tolist() == [len(want)] * 2
    ids, lengths = render(compile_template(Template.of(), tokenizer), np.zeros((2, 0), np.int32), 1)
    assert ids.tolist() == [[0], [0]]
    assert lengths.tolist() == [0, 0]


def test_rows_with_the_same_ids_are_stored_once():
    tokenizer = get_tokenizer("tiny")
    one = compile_template(Template.of("a\n", Slot("r", LAKE_ROW), "b"), tokenizer)
    four = compile_template(Template.of("a\n", *(Slot(f"r{i}", LAKE_ROW) for i in range(4)), "b"), tokenizer)
    assert four.ids.shape == one.ids.shape


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["Tu", Slot("verb", ("rn", "x")), "."], "'Tu'.*slot 'verb'.*'rn"),  # a word torn apart
        (["State", Slot("end", (":", "")), "\n"], "slot 'end'"),  # ":\n" is one token
        (["a \n", Slot("line", ("x", "\ny"))], "slot 'line'"),  # white space meets white space
        (["State", Slot("mark", ("", "́"))], "slot 'mark'"),  # a combining mark
        (["Go", Slot("none", ())], "slot 'none' has no values"),
        # Only the pair of second values is bad, and only across the empty piece in their middle.
        (
            [Slot("l", ("Left.", "Up:")), Slot("m", (" x ", "")), Slot("r", ("b", "\nc"))],
            "slot 'l' and slot 'r'",
        ),
    ],
)
def test_bad_joins_are_refused(parts, message):
    with pytest.raises(TemplateError, match=f"frost: .*{message}"):
        compile_template(Template.of(*parts), get_tokenizer("qwen2_5"), name="frost")


def test_context_is_checked():
    tokenizer = get_tokenizer("qwen2_5")
    template = Template.of("\nState", Slot("n", (" 1", " 2")))
    compile_template(template, tokenizer, before="<|im_end|>", after="<|im_end|>")
    with pytest.raises(TemplateError, match="the text before"):
        compile_template(template, tokenizer, before="Done.")


def test_too_narrow_and_wrong_slot_count():
    tables = compile_template(Template.of("Turn", Slot("n", (" left", "")), "."), get_tokenizer("tiny"))
    with pytest.raises(ValueError, match="the width is 2"):
        render(tables, np.zeros((1, 1), np.int32), 2)
    with pytest.raises(AssertionError):
        render(tables, np.zeros((1, 2), np.int32), 3)


def test_one_trace_for_all_boards():
    traces = 0

    @jax.jit
    def counted(tables, slots):
        nonlocal traces
        traces += 1
        return render(tables, slots, 8)

    tables = compile_template(Template.of("Turn", Slot("n", (" left", " up")), "."), get_tokenizer("tiny"))
    for value in (0, 1):
        counted(tables, np.full((4, 1), value, np.int32))
    assert traces == 1
