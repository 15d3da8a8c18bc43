"""Episodes for people: a trajectory decoded on the host into dialogues with their boards, as JSON lines."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ragen_jax.rollout.episode import system_prompt
from ragen_jax.train.program import Program
from ragen_jax.types import Trajectory


def decode_episodes(
    program: Program, trajectory: Trajectory, *, step: int, group_size: int, count: int
) -> list[dict[str, Any]]:
    """The first `count` episodes as JSON objects.

    Keys: step, env, group, member, success, return, system, turns, final_board, tokens, loss_mask,
    logprobs. A turn has user, reply, actions, reward, env_reward, format_valid, board. `tokens` and the
    two lists beside it are exactly what was generated and what is trained on.
    """
    count = min(count, trajectory.success.shape[0])
    part = jax.device_get(jax.tree.map(lambda x: x[:count], trajectory._replace(states=None))._asdict())
    states = jax.tree.map(lambda x: x[:, :count], trajectory.states)
    return [
        _episode(
            program, {k: v[row] for k, v in part.items() if v is not None}, states, row, step, group_size
        )
        for row in range(count)
    ]


def _episode(
    program: Program, part: dict[str, np.ndarray], states: Any, row: int, step: int, group_size: int
) -> dict[str, Any]:
    valid = part["valid"]
    tokens, mask, turns = (part[k][valid] for k in ("tokens", "loss_mask", "turn_ids"))
    played = int(part["turn_played"].sum())

    def board(turn: int) -> str:
        return program.env.describe(jax.tree.map(lambda x: x[turn, row], states))

    dialogue = []
    prefix = program.settings.reply_prefix
    for turn in range(played):
        here = turns == turn
        user = program.tokenizer.decode(tokens[here & ~mask].tolist())
        dialogue.append(
            {
                "user": _message(program, user),
                "reply": prefix + program.tokenizer.decode(tokens[here & mask].tolist()),
                "actions": [program.env.actions[a] for a in part["actions"][turn] if a >= 0],
                "reward": round(float(part["turn_rewards"][turn]), 4),
                "env_reward": round(float(part["env_rewards"][turn]), 4),
                "format_valid": bool(part["format_valid"][turn]),
                "board": board(turn),
            }
        )
    return {
        "step": step,
        "env": program.env.name,
        "group": row // group_size,
        "member": row % group_size,
        "success": bool(part["success"]),
        "return": round(float(part["turn_rewards"].sum()), 4),
        "system": system_prompt(program.env, program.settings),
        "turns": dialogue,
        "final_board": board(played),
        "tokens": tokens.tolist(),
        "loss_mask": mask.astype(int).tolist(),
        "logprobs": np.round(part["behaviour_logprobs"][valid], 5).tolist(),
    }


def _message(program: Program, text: str) -> str:
    """The user's words out of their chat frame."""
    frame = program.tokenizer.frame
    opening = frame.user_open.strip()
    closing = frame.user_close.strip() + program.settings.reply_prefix
    start = text.find(opening)
    text = text[start + len(opening) :] if start >= 0 else text
    end = text.rfind(closing.split("\n")[0])
    return (text[:end] if end >= 0 else text).strip("\n")


def write_episodes(path: pathlib.Path, episodes: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in episodes))
    temporary.replace(path)
