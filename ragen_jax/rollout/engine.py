"""The multi-turn engine: decode, parse, step, render, append, next turn, in one compiled program.

The columns of one KV cache are laid out by turn: the system prompt, then every turn's message and reply.
A message is padded on the left, so that its last column is real in every row, a reply on the right; a mask
and per-row positions keep the padding invisible. The `[b, s]` buffers indexed by column are the trajectory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from envs_jax import TextEnv
from ragen_jax.errors import UserError
from ragen_jax.models.transformer import CausalLM
from ragen_jax.rollout.decoding import Decoding, append, blank, generate_turn, spread
from ragen_jax.rollout.episode import EpisodeSettings, EpisodeTables, turn_slots
from ragen_jax.rollout.worlds import Played, play_actions, reset_groups
from ragen_jax.text.parse import parse
from ragen_jax.text.render import render
from ragen_jax.types import Trajectory


def count_columns(settings: EpisodeSettings, tables: EpisodeTables, turns: int) -> int:
    """Columns of the system prompt and the first `turns` turns."""
    return tables.prompt.shape[0] + turns * (tables.turn.max_length + settings.max_new_tokens)


def turn_bounds(turns: int, stages: int) -> list[int]:
    """The turn before which each stage ends: `turns` cut into `stages` parts, shorter ones first."""
    stages = min(stages, turns)
    return [turns * (stage + 1) // stages for stage in range(stages)]


class Episodes(NamedTuple):
    """A batch of episodes in progress. Every leaf has its rows first."""

    keys: chex.PRNGKey  # [b], of sampling
    decoding: Decoding
    worlds: Played
    alive: Bool[Array, "b"]
    lacks_end: Bool[Array, "b"]  # the last reply stopped without sampling the end of its turn
    turn_ends: Int[Array, "b t"]  # the column of a turn's last sampled token, -1 in turns not played
    turn_rewards: Float[Array, "b t"]
    env_rewards: Float[Array, "b t"]
    turn_played: Bool[Array, "b t"]
    format_valid: Bool[Array, "b t"]
    actions: Int[Array, "b t a"]
    success: Bool[Array, "b"]
    states: Any  # leaves [b, t + 1, ...]


def rollout(
    model: CausalLM,
    env: TextEnv,
    settings: EpisodeSettings,
    tables: EpisodeTables,
    level_keys: chex.PRNGKey,
    key: chex.PRNGKey,
    temperature: Float[Array, ""],
    *,
    group_size: int,
    block: int = 0,
    stages: int = 1,
) -> Trajectory:
    """Play one episode in every row, from the first prompt to the last reward.

    Args:
      model: the policy, in the precision to decode in.
      env, settings: static; `tables` is what `compile_tables` made of them.
      level_keys: one key a group `[g]`: the levels.
      key: everything else that is random.
      temperature: traced; 0 is greedy.
      group_size: members a group.
      block: rows played at a time. A turn then costs what its unfinished episodes cost, rounded up to whole
        blocks, in place of what all rows cost. 0, or a number that does not divide the rows: all at once.
        The episodes are the same.
      stages: into how many parts the turns are cut. A token attends to as many columns as its part needs in
        the end, so with more stages early turns cost less, and a turn is compiled once for each stage.

    Returns:
      The trajectory of `g * group_size` episodes; members of a group are adjacent.
    """
    batch = level_keys.shape[0] * group_size
    # The head as the decode step reads it, [d, v]; made once, outside the loops.
    head = model.head_weight().T
    play = functools.partial(_play_turn, model, head, env, settings, tables, temperature)
    episodes = _open(model, env, settings, tables, level_keys, key, group_size)

    def every_row(turn: Int[Array, ""], episodes: Episodes) -> Episodes:
        return play(turn, episodes)

    def unfinished_rows(turn: Int[Array, ""], episodes: Episodes) -> Episodes:
        first = jnp.argsort(~episodes.alive, stable=True)  # unfinished rows before finished ones

        def one(i: Int[Array, ""], episodes: Episodes) -> Episodes:
            rows = jax.lax.dynamic_slice_in_dim(first, i * block, block)
            played = play(turn, jax.tree.map(lambda x: x[rows], episodes))
            return jax.tree.map(
                lambda whole, part: whole.at[rows].set(part, unique_indices=True), episodes, played
            )

        return jax.lax.fori_loop(0, -(-jnp.sum(episodes.alive) // block), one, episodes)

    step = unfinished_rows if block and batch > block and batch % block == 0 else every_row
    turn = jnp.int32(0)
    for last in turn_bounds(settings.max_turns, stages):
        columns = count_columns(settings, tables, last)
        episodes = episodes._replace(decoding=spread(model, episodes.decoding, batch, columns))
        # Stops when no episode goes on; `alive` also falls after the last turn.
        turn, episodes = jax.lax.while_loop(
            lambda carry: jnp.any(carry[1].alive) & (carry[0] < last),  # noqa: B023
            lambda carry: (carry[0] + 1, step(*carry)),
            (turn, episodes),
        )
    done = episodes.decoding
    ends = jax.nn.one_hot(episodes.turn_ends, done.tokens.shape[1], dtype=bool)
    return Trajectory(
        tokens=done.tokens,
        valid=done.valid,
        loss_mask=done.loss_mask,
        behaviour_logprobs=done.logprobs,
        turn_ids=done.turn_ids,
        turn_ends=jnp.any(ends, axis=1),
        turn_rewards=episodes.turn_rewards,
        env_rewards=episodes.env_rewards,
        turn_played=episodes.turn_played,
        format_valid=episodes.format_valid,
        actions=episodes.actions,
        success=episodes.success,
        states=jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), episodes.states),
    )


def _play_turn(
    model: CausalLM,
    head: Float[Array, "d v"],
    env: TextEnv,
    settings: EpisodeSettings,
    tables: EpisodeTables,
    temperature: Float[Array, ""],
    turn: Int[Array, ""],
    episodes: Episodes,
) -> Episodes:
    """One turn of every unfinished episode: the world's message, the policy's reply, its actions."""
    alive, budget, width = episodes.alive, settings.max_new_tokens, tables.turn.max_length
    start = tables.prompt.shape[0] + turn * (width + budget)

    def open_turn(decoding: Decoding) -> Decoding:
        reward = episodes.env_rewards[:, turn - 1]
        ids, lengths = _message(env, settings, tables, episodes.worlds, turn, episodes.lacks_end, reward)
        return append(model, decoding, ids, jnp.where(alive, lengths, 0), column=start, turn=turn)

    # The first turn's message is there already: it was prefilled once a group.
    decoding = jax.lax.cond(turn > 0, open_turn, lambda d: d, episodes.decoding)
    decoding, reply = generate_turn(
        model,
        head,
        tables,
        decoding,
        alive,
        episodes.keys,
        column=start + width,
        turn=turn,
        temperature=temperature,
        max_new_tokens=budget,
    )
    parsed = parse(tables.parser, reply.tokens, reply.lengths)
    possible = jax.vmap(env.valid_actions)(episodes.worlds.states)
    named = parsed.actions >= 0
    known = named & jnp.take_along_axis(possible, jnp.maximum(parsed.actions, 0), axis=1)
    unknown = parsed.num_unknown + jnp.sum(named & ~known, axis=1)
    format_valid = alive & parsed.found & jnp.any(known, axis=1) & (unknown == 0)
    worlds, env_reward, executed = play_actions(
        env, episodes.worlds, jnp.where(known, parsed.actions, -1), alive, settings.max_actions
    )
    reward = env_reward + jnp.where(alive & ~format_valid, settings.format_penalty, 0.0)
    success = episodes.success | (worlds.done & jax.vmap(env.success)(worlds.states))
    end = start + width + reply.lengths - 1
    still = alive & ~worlds.done & (worlds.spent < settings.max_actions) & (turn + 1 < settings.max_turns)

    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=turn, axis=1)
    return Episodes(
        keys=episodes.keys,
        decoding=decoding,
        worlds=worlds,
        alive=still,
        lacks_end=~reply.ended,
        turn_ends=put(episodes.turn_ends, jnp.where(alive, end, -1)),
        turn_rewards=put(episodes.turn_rewards, jnp.where(alive, reward, 0.0)),
        env_rewards=put(episodes.env_rewards, env_reward),
        turn_played=put(episodes.turn_played, alive),
        format_valid=put(episodes.format_valid, format_valid),
        actions=put(episodes.actions, executed),
        success=success,
        states=_record(episodes.states, worlds.states, turn + 1),
    )


def _message(
    env: TextEnv,
    settings: EpisodeSettings,
    tables: EpisodeTables,
    worlds: Played,
    turn: Int[Array, ""],
    lacks_end: Bool[Array, "b"],
    reward: Float[Array, "b"],
) -> tuple[Int[Array, "b w"], Int[Array, "b"]]:
    """The user message that opens a turn, as left-padded ids and their number."""
    slots = turn_slots(
        env,
        settings,
        lacks_end=lacks_end,
        reward=reward,
        turn=turn,
        observation=jax.vmap(env.observe)(worlds.states),
        actions_left=settings.max_actions - worlds.spent,
    )
    return render(tables.turn, slots, tables.turn.max_length)


def _record(history: Any, states: Any, index: Int[Array, ""]) -> Any:
    """Write `states` at `index` and everywhere behind it, so that an episode's last state closes its row."""
    later = jnp.arange(jax.tree.leaves(history)[0].shape[1]) >= index

    def write(old: Array, new: Array) -> Array:
        return jnp.where(later.reshape((1, -1) + (1,) * (new.ndim - 1)), new[:, None], old)

    return jax.tree.map(write, history, states)


def _open(
    model: CausalLM,
    env: TextEnv,
    settings: EpisodeSettings,
    tables: EpisodeTables,
    level_keys: chex.PRNGKey,
    key: chex.PRNGKey,
    group_size: int,
) -> Episodes:
    """Episodes before their first reply.

    The system prompt is prefilled once and the first message once a group; both are handed to every member.
    """
    groups = level_keys.shape[0]
    batch, turns = groups * group_size, settings.max_turns
    member_key, sample_key = jax.random.split(key)
    member_keys, row_keys = jax.random.split(member_key, batch), jax.random.split(sample_key, batch)
    group_states, states = reset_groups(env, level_keys, member_keys, group_size)
    no, none = jnp.zeros(groups, bool), jnp.zeros(groups, jnp.float32)
    opened = Played(group_states, no, jnp.zeros(groups, jnp.int32))
    ids, lengths = _message(env, settings, tables, opened, jnp.int32(0), no, none)
    prompt, width = tables.prompt, tables.turn.max_length
    size = prompt.shape[0]

    one = jnp.full(1, size, jnp.int32)
    common = append(model, blank(model, 1, size), prompt[None], one, column=jnp.int32(0), turn=jnp.int32(-1))
    group = spread(model, common, groups, size + width)
    group = append(model, group, ids, lengths, column=jnp.int32(size), turn=jnp.int32(0))
    decoding = spread(model, group, batch, count_columns(settings, tables, 1))
    return Episodes(
        keys=row_keys,
        decoding=decoding,
        worlds=Played(states, jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32)),
        alive=jnp.ones(batch, bool),
        lacks_end=jnp.zeros(batch, bool),
        turn_ends=jnp.full((batch, turns), -1, jnp.int32),
        turn_rewards=jnp.zeros((batch, turns), jnp.float32),
        env_rewards=jnp.zeros((batch, turns), jnp.float32),
        turn_played=jnp.zeros((batch, turns), bool),
        format_valid=jnp.zeros((batch, turns), bool),
        actions=jnp.full((batch, turns, settings.max_actions_per_turn), -1, jnp.int32),
        success=jnp.zeros(batch, bool),
        states=jax.tree.map(lambda x: jnp.stack([x] * (turns + 1), axis=1), states),
    )


class Engine:
    """The rollout of one environment with one model shape, compiled once for each batch shape.

    Parameters, tables, keys and temperature are arguments of the compiled program; nothing in a call
    goes back to the host.
    """

    def __init__(
        self,
        env: TextEnv,
        settings: EpisodeSettings,
        tables: EpisodeTables,
        graphdef: nnx.GraphDef,
        *,
        dtype: Any,
        max_context: int,
        block: int = 0,
        stages: int = 1,
    ) -> None:
        """Raises UserError if the context cannot hold one turn, or all of them."""
        self.columns = count_columns(settings, tables, settings.max_turns)
        one_turn = count_columns(settings, tables, 1)
        if self.columns > max_context:
            what = (
                f"cannot hold one turn ({one_turn} tokens)"
                if one_turn > max_context
                else f"cannot hold {settings.max_turns} turns ({self.columns} tokens)"
            )
            raise UserError(
                f"rollout.context is {max_context}, which {what}; raise it, or lower "
                "rollout.max_new_tokens or rollout.max_turns."
            )
        self.env, self.settings, self.tables = env, settings, tables
        self._compiled = jax.jit(
            functools.partial(
                _merged_rollout,
                env=env,
                settings=settings,
                graphdef=graphdef,
                dtype=dtype,
                block=block,
                stages=stages,
            ),
            static_argnames="group_size",
        )

    def __call__(
        self,
        params: nnx.State,
        level_keys: chex.PRNGKey,
        key: chex.PRNGKey,
        temperature: Float[Array, ""],
        *,
        group_size: int,
    ) -> Trajectory:
        """See `rollout`."""
        return self._compiled(params, self.tables, level_keys, key, temperature, group_size=group_size)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the program for the given arguments, for a look at what it compiles to."""
        params, *rest = args
        return self._compiled.lower(params, self.tables, *rest, **kwargs)


def _merged_rollout(
    params, tables, level_keys, key, temperature, *, env, settings, graphdef, dtype, group_size, block, stages
) -> Trajectory:
    # One cast before the loops: a cast inside them would read the wide weights at every token.
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    model = nnx.merge(graphdef, params)
    return rollout(
        model,
        env,
        settings,
        tables,
        level_keys,
        key,
        temperature,
        group_size=group_size,
        block=block,
        stages=stages,
    )
