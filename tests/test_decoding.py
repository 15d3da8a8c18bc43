"""Conversations on a cache, driven turn by turn as a Python world would."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.models.transformer import CausalLM
from ragen_jax.rollout.decoding import append, blank, generate_turn, spread
from tests.programs import program

WIDTH, BUDGET, ROWS = 6, 8, 4
KEYS = jax.random.split(jax.random.key(0), ROWS)


@functools.cache
def compiled():
    """The two steps, and an empty batch wide enough for two turns."""
    made = program()
    model = made.model
    head = model.head_weight().T
    say = jax.jit(functools.partial(append, model))
    reply = jax.jit(functools.partial(generate_turn, model, head, made.tables, max_new_tokens=BUDGET))
    return say, reply, blank(model, ROWS, 2 * (WIDTH + BUDGET))


def message(seed, lengths):
    ids = np.random.default_rng(seed).integers(10, 200, (ROWS, WIDTH)).astype(np.int32)
    return jnp.asarray(ids), jnp.asarray(lengths, jnp.int32)


def turn(state, number, lengths, active):
    say, reply, _ = compiled()
    column = jnp.int32(number * (WIDTH + BUDGET))
    state = say(state, *message(number, lengths), column=column, turn=jnp.int32(number))
    return reply(
        state,
        jnp.asarray(active),
        KEYS,
        column=column + WIDTH,
        turn=jnp.int32(number),
        temperature=jnp.float32(1e6),  # uniform: the draws alone decide
    )


def test_rows_that_sit_out_stay_as_they_are():
    everyone = [True] * ROWS
    state, _ = turn(compiled()[2], 0, [6, 3, 5, 1], everyone)
    after, answered = turn(state, 1, [4, 0, 0, 6], [True, False, False, True])
    assert (np.asarray(answered.lengths) > 0).tolist() == [True, False, False, True]
    for name in ("hidden", "lengths", "valid", "loss_mask"):
        before, now = getattr(state, name), getattr(after, name)
        np.testing.assert_array_equal(now[1:3], before[1:3], err_msg=name)
        assert not np.array_equal(now[0], before[0]), name


def test_turns_draw_anew_and_rows_apart():
    state, first = turn(compiled()[2], 0, [6, 3, 5, 1], [True] * ROWS)
    _, second = turn(state, 1, [6, 3, 5, 1], [True] * ROWS)
    replies = [tuple(row) for reply in (first, second) for row in np.asarray(reply.tokens).tolist()]
    assert len(set(replies)) == 2 * ROWS
    _, again = turn(compiled()[2], 0, [6, 3, 5, 1], [True] * ROWS)
    np.testing.assert_array_equal(again.tokens, first.tokens)


def test_bfloat16_rounds_no_logits():
    """The log-probability recorded is that of the head in training: a float32 sum of bfloat16 products."""
    made = program()
    model = CausalLM(made.model.config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    hidden = 30 * jax.random.normal(jax.random.key(0), (ROWS, made.model.config.hidden_size), jnp.bfloat16)
    state = blank(model, ROWS, BUDGET)._replace(hidden=hidden)
    zero, one = jnp.int32(0), jnp.float32(1.0)
    step = functools.partial(generate_turn, max_new_tokens=1)
    everyone = jnp.ones(ROWS, bool)
    head = model.head_weight().T
    # Operation by operation: a compiler may leave out roundings that the program asks for.
    with jax.disable_jit():
        after, reply = step(
            model, head, made.tables, state, everyone, KEYS, column=zero, turn=zero, temperature=one
        )
    table = jax.nn.log_softmax(jnp.where(made.tables.ban[None], -1e30, model.logits(hidden)), axis=-1)
    expected = jnp.take_along_axis(table, reply.tokens, axis=1)
    np.testing.assert_allclose(after.logprobs[:, :1], expected, atol=1e-4)


def test_spread_repeats_rows_and_adds_blank_columns():
    made = program()
    state, _ = turn(compiled()[2], 0, [6, 3, 5, 1], [True] * ROWS)
    columns = state.tokens.shape[1]
    wide = spread(made.model, state, 2 * ROWS, columns + 5)
    empty = blank(made.model, 2 * ROWS, 5)
    for got, small, none in zip(*map(jax.tree.leaves, (wide, state, empty)), strict=True):
        twice = np.repeat(small, 2, axis=0)
        grown = [axis for axis in range(got.ndim) if got.shape[axis] != twice.shape[axis]]
        if grown:
            twice = np.concatenate([twice, none], axis=grown[0])
        np.testing.assert_array_equal(got, twice)
