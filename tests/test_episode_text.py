"""The messages of every world, and the expert's replies, against every tokenizer."""

import jax
import numpy as np
import pytest

import envs_jax
from envs_jax import Template
from ragen_jax.rollout.episode import EpisodeSettings, turn_template
from ragen_jax.text.render import compile_template, render
from ragen_jax.train.sft import compile_replies, reply_template
from tests.tokenizers import NAMES, get_tokenizer

SETTINGS = {
    "v1": EpisodeSettings(),
    "short": EpisodeSettings(max_actions_per_turn=2, repeat_format=False, think=False),
}


def check(template: Template, tables, encode, seed: int, boards: np.ndarray | None = None, first: int = 0):
    """Rendered ids of random slots equal the tokenizer's ids of the same text."""
    rng = np.random.default_rng(seed)
    slots = np.stack([rng.integers(0, len(slot.values), 64) for slot in template.slots], axis=1)
    if boards is not None:
        slots[:, first : first + boards.shape[1]] = boards
    ids, lengths = jax.jit(render, static_argnums=2)(tables, slots.astype(np.int32), tables.max_length)
    ids, lengths = np.asarray(ids), np.asarray(lengths)
    for row in range(len(slots)):
        text = template.render_text(slots[row].tolist())
        assert ids[row, ids.shape[1] - lengths[row] :].tolist() == encode(text), text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", envs_jax.names())
@pytest.mark.parametrize("kind", SETTINGS)
def test_messages_and_replies_are_the_tokenizers_ids(name, world, kind):
    tokenizer, env, settings = get_tokenizer(name), envs_jax.make(world), SETTINGS[kind]
    template = turn_template(env, settings, tokenizer)
    tables = compile_template(template, tokenizer, before=tokenizer.frame.system_close)
    states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 64))
    boards = np.asarray(jax.vmap(env.observe)(states))
    check(template, tables, tokenizer.encode, 0, boards, first=3)
    replies = reply_template(env, settings)
    check(replies, compile_replies(env, settings, tokenizer), tokenizer.encode, 1)
