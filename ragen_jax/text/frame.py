"""The strings that stand around the messages of a conversation, read off a chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ragen_jax.text.types import TokenizerError

__all__ = ["ChatFrame", "derive_frame"]

_SYSTEM, _USER, _REPLY, _NEXT_USER = "SYSTEMmessage", "FIRSTmessage", "REPLYmessage", "NEXTmessage"


class ChatFrame(NamedTuple):
    """A conversation is `system_open + system + system_close`, then for every turn
    `user_open + user + user_close + reply + eot`.

    `eot` is one special token, and so is the end of `system_close`, hence `user_open` is what follows
    an end of turn. `user_close` runs from the end of the user's message to the start of the reply.
    """

    system_open: str
    system_close: str
    user_open: str
    user_close: str
    eot: str


def derive_frame(hf: Any, specials: Sequence[str]) -> ChatFrame:
    """Derive the frame from the template of a `transformers` tokenizer.

    A conversation of marker messages is rendered, with a reply in its middle and the generation prompt
    at its end, and cut at the markers. A template may put an (empty or opened) think block before one of
    the two replies but not the other, as thinking models' do; the frame is the part without it.

    Args:
      hf: the tokenizer.
      specials: the strings of its special tokens.

    Raises TokenizerError if there is no template, if it fails, drops or reorders messages, frames first
    and later user messages differently, or does not end messages with special tokens.
    """
    name = hf.name_or_path
    if not getattr(hf, "chat_template", None):
        raise TokenizerError(f"the tokenizer {name!r} has no chat template")
    messages = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": _REPLY},
        {"role": "user", "content": _NEXT_USER},
    ]
    try:
        text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever the template raises, e.g. "system role not supported"
        raise TokenizerError(f"the chat template of {name!r} fails: {error}") from error

    parts = re.split("|".join((_SYSTEM, _USER, _REPLY, _NEXT_USER)), text)
    found = re.findall("|".join((_SYSTEM, _USER, _REPLY, _NEXT_USER)), text)
    if found != [_SYSTEM, _USER, _REPLY, _NEXT_USER]:
        raise TokenizerError(f"the chat template of {name!r} drops, repeats or reorders messages")
    system_open, system_to_user, user_to_reply, reply_to_user, generation = parts

    eot = max((s for s in specials if reply_to_user.startswith(s)), key=len, default="")
    if not eot:
        raise TokenizerError(f"the chat template of {name!r} does not end a reply with a special token")
    user_open = reply_to_user[len(eot) :]
    if not system_to_user.endswith(user_open):
        raise TokenizerError(f"the chat template of {name!r} opens the first user message differently")
    system_close = system_to_user[: len(system_to_user) - len(user_open)]
    user_close = _without_think(user_to_reply, generation)
    if user_close is None:
        raise TokenizerError(
            f"the generation prompt of {name!r} is not what its template puts before a reply"
        )
    if not system_close.endswith(tuple(specials)) or not user_close.startswith(tuple(specials)):
        raise TokenizerError(f"the chat template of {name!r} does not end messages with special tokens")
    return ChatFrame(system_open, system_close, user_open, user_close, eot)


def _without_think(left: str, right: str) -> str | None:
    """The shorter of two strings if the longer one adds nothing but think tags to it, else None."""
    short, long = sorted((left, right), key=len)
    if not long.startswith(short):
        return None
    rest = re.sub(r"<think>|</think>|\s", "", long[len(short) :])
    return short if not rest else None
