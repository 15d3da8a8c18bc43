"""What an episode looks like as text: settings, system prompt, turn message, and their token tables."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from envs_jax import Slot, Template, TextEnv
from ragen_jax.text.parse import ParserTables, compile_parser
from ragen_jax.text.render import RenderTables, compile_template
from ragen_jax.text.stop import compile_stop
from ragen_jax.text.tokenizer import TextTokenizer, TokenBytes


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
    """The rules of an episode that are not the world's (RAGEN, arXiv 2504.20073, section 3)."""

    max_turns: int = 5
    max_actions_per_turn: int = 5
    max_actions: int = 10
    max_new_tokens: int = 400
    think: bool = True
    separator: str = "||"
    format_penalty: float = -0.1
    repeat_format: bool = True  # state the reply format in every turn, not in the system prompt alone
    instructions: bool = True  # False: no rules in the system prompt, for models trained from scratch

    @property
    def reply_prefix(self) -> str:
        """What every reply is forced to begin with."""
        return "<think>" if self.think else "<answer>"


class EpisodeTables(NamedTuple):
    """Everything about text that the compiled rollout needs, as arrays: arguments, not constants."""

    prompt: Int[Array, "p"]
    turn: RenderTables
    parser: ParserTables
    stop: Array  # next state by (state, token); the last state has seen </answer>
    ban: Bool[Array, "v"]
    eot: Int[Array, ""]


def system_prompt(env: TextEnv, settings: EpisodeSettings) -> str:
    """The message that opens every episode: the world's rules, then how to reply; or the world's name."""
    return f"{env.rules}\n{_format_line(env, settings)}" if settings.instructions else env.name


def _format_line(env: TextEnv, settings: EpisodeSettings) -> str:
    count = settings.max_actions_per_turn
    answer = "action" if count == 1 else f"action {settings.separator} action"
    thought = "<think>thought</think>" if settings.think else ""
    limit = "one action" if count == 1 else f"up to {count} actions"
    return f"Reply {thought}<answer>{answer}</answer> with {limit}, at most {settings.max_new_tokens} tokens."


def reward_levels(env: TextEnv, settings: EpisodeSettings) -> np.ndarray:
    """All turn rewards that the text can show, float64 `[n]`, in steps of 0.1."""
    low, high = env.reward_range
    count = settings.max_actions_per_turn
    ends = round(min(low, low * count, 0.0) * 10), round(max(high, high * count, 0.0) * 10)
    return np.arange(ends[0], ends[1] + 1) / 10


def turn_template(env: TextEnv, settings: EpisodeSettings, tokenizer: TextTokenizer) -> Template:
    """The user message of a turn in its chat frame, up to and with the forced start of the reply.

    Slots, in order: the end-of-turn marker that the reply before may lack, the reward of the turn
    before, the turn's number, the environment's own, the actions left.
    """
    frame = tokenizer.frame
    rewards = tuple(f"Reward: {value:.1f}\n" for value in reward_levels(env, settings))
    ending = Template.of(
        "Actions left:",
        Slot("actions_left", tuple(f" {n}" for n in range(settings.max_actions + 1))),
        ".\n" + _format_line(env, settings) if settings.repeat_format else ".",
        frame.user_close + settings.reply_prefix,
    )
    opening = Template.of(
        Slot("end_of_turn", ("", frame.eot)),
        frame.user_open,
        Slot("reward", ("", *rewards)),
        "Turn",
        Slot("turn", tuple(f" {n + 1}" for n in range(settings.max_turns))),
        ":\n",
    )
    last = env.template.parts[-1]
    closed = last.text if hasattr(last, "text") else last.values[0]
    newline = Template.of("" if closed.endswith("\n") else "\n")
    return opening + env.template + newline + ending


def turn_slots(
    env: TextEnv,
    settings: EpisodeSettings,
    *,
    lacks_end: Bool[Array, "b"],
    reward: Array,
    turn: Int[Array, ""],
    observation: Int[Array, "b s"],
    actions_left: Int[Array, "b"],
) -> Int[Array, "b s2"]:
    """Slot indices of `turn_template`, int32. The first turn (0) shows no reward."""
    levels = reward_levels(env, settings)
    shown = jnp.round(reward * 10).astype(jnp.int32) - round(float(levels[0]) * 10)
    shown = jnp.where(turn > 0, 1 + jnp.clip(shown, 0, len(levels) - 1), 0)
    columns = [lacks_end.astype(jnp.int32)[:, None], shown[:, None]]
    columns += [jnp.broadcast_to(turn, shown.shape)[:, None], observation, actions_left[:, None]]
    return jnp.concatenate(columns, axis=1).astype(jnp.int32)


def compile_tables(
    env: TextEnv, settings: EpisodeSettings, tokenizer: TextTokenizer, token_bytes: TokenBytes
) -> EpisodeTables:
    """Compile an environment's text for a tokenizer (about a second).

    Raises:
      TemplateError: the tokenizer would merge tokens across a join of the template.
    """
    frame = tokenizer.frame
    opening = frame.system_open + system_prompt(env, settings) + frame.system_close
    vocab = token_bytes.offsets.shape[0] - 1
    tables = EpisodeTables(
        prompt=jnp.asarray(tokenizer.encode(opening), jnp.int32),
        turn=compile_template(turn_template(env, settings, tokenizer), tokenizer, before=frame.system_close),
        parser=compile_parser(
            env.actions,
            separator=settings.separator,
            max_actions=settings.max_actions_per_turn,
            think=settings.think,
            token_bytes=token_bytes,
        ),
        stop=jnp.asarray(compile_stop(token_bytes)),
        ban=jnp.asarray(tokenizer.sampling_ban(vocab)),
        eot=jnp.asarray(tokenizer.eot_id, jnp.int32),
    )
    return jax.tree.map(jnp.asarray, tables)
