"""The multi-turn engine: decode, parse, step, render, append, next turn, in one compiled program.

All rows of the batch share the columns of one KV cache that lives through the episode. A turn's message
is padded on the left inside its block, so that its last column is real in every row; a mask and per-row
positions keep the padding invisible. The `[b, s]` buffers indexed by column are the trajectory itself.
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
from ragen_jax.models.transformer import Cache, CausalLM, init_cache
from ragen_jax.rollout.episode import EpisodeSettings, EpisodeTables, turn_slots
from ragen_jax.rollout.sampling import restrict, row_uniforms, sample
from ragen_jax.text.parse import parse
from ragen_jax.text.render import render
from ragen_jax.types import Trajectory


class Decoding(NamedTuple):
    """A batch of conversations in progress, indexed by shared cache column."""

    cache: Cache
    hidden: Float[Array, "b d"]  # of the last token appended: what the next token is drawn from
    tokens: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    loss_mask: Bool[Array, "b s"]
    logprobs: Float[Array, "b s"]
    turn_ids: Int[Array, "b s"]
    column: Int[Array, ""]  # next free column
    lengths: Int[Array, "b"]  # tokens so far: the next position
    draws: Int[Array, ""]  # sampling steps so far: no uniform is used twice


class Reply(NamedTuple):
    """What `generate_turn` sampled: the first `lengths` of `tokens`."""

    tokens: Int[Array, "b n"]
    lengths: Int[Array, "b"]
    ended: Bool[Array, "b"]  # the policy sampled the end-of-turn token itself


class Played(NamedTuple):
    """The worlds of a batch of episodes."""

    states: Any  # leaves [b, ...]
    done: Bool[Array, "b"]
    spent: Int[Array, "b"]  # actions executed


class _Loop(NamedTuple):
    turn: Int[Array, ""]
    decoding: Decoding
    worlds: Played
    alive: Bool[Array, "b"]
    turn_ends: Bool[Array, "b s"]
    turn_rewards: Float[Array, "b t"]
    env_rewards: Float[Array, "b t"]
    turn_played: Bool[Array, "b t"]
    format_valid: Bool[Array, "b t"]
    actions: Int[Array, "b t a"]
    success: Bool[Array, "b"]
    states: Any  # leaves [t + 1, b, ...]


def _write(buffer: Array, block: Array, column: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, block.astype(buffer.dtype), column, axis=1)


def append(
    model: CausalLM, state: Decoding, ids: Int[Array, "b w"], lengths: Int[Array, "b"], turn: Int[Array, ""]
) -> Decoding:
    """Append each row's message, the last `lengths` of its `ids`, to its conversation.

    Rows of length 0 stay as they are; the shared column moves by w.
    """
    chex.assert_rank([ids, lengths], [2, 1])
    width = ids.shape[1]
    rank = jnp.arange(width)[None, :] - (width - lengths[:, None])
    real = rank >= 0
    valid = _write(state.valid, real, state.column)
    positions = state.lengths[:, None] + jnp.maximum(rank, 0)
    hidden, cache = model.extend(ids, positions, state.cache, state.column, valid)
    return state._replace(
        cache=cache,
        hidden=hidden[:, -1],
        tokens=_write(state.tokens, jnp.where(real, ids, 0), state.column),
        valid=valid,
        turn_ids=_write(state.turn_ids, jnp.where(real, turn, -1), state.column),
        column=state.column + width,
        lengths=state.lengths + lengths,
    )


def generate_turn(
    model: CausalLM,
    head: Float[Array, "d v"],
    tables: EpisodeTables,
    state: Decoding,
    active: Bool[Array, "b"],
    keys: chex.PRNGKey,
    *,
    turn: Int[Array, ""],
    temperature: Float[Array, ""],
    max_new_tokens: int,
) -> tuple[Decoding, Reply]:
    """Sample one reply for every active row; the others wait.

    A row stops at its end-of-turn token, once `</answer>` is complete however it was spelt in tokens,
    or after `max_new_tokens`. The loop ends when every row has stopped.
    """
    start, batch = state.column, active.shape[0]
    # Per-row streams of uniforms: a row's reply does not depend on who else is in the batch.
    accepted = tables.stop.shape[0] - 1

    def unfinished(carry):
        step, _, going, _, _ = carry
        return (step < max_new_tokens) & jnp.any(going)

    def decode(carry):
        step, state, going, matched, ended = carry
        logits = restrict(state.hidden @ head, ban=tables.ban, temperature=temperature)
        uniforms = row_uniforms(keys, state.draws)
        token, logprob = sample(logits, uniforms, greedy=temperature <= 0)
        column = start + step
        valid = _write(state.valid, going[:, None], column)
        hidden, cache = model.extend(token[:, None], state.lengths[:, None], state.cache, column, valid)
        state = state._replace(
            cache=cache,
            # A row that has stopped keeps what its own last token left behind.
            hidden=jnp.where(going[:, None], hidden[:, 0], state.hidden),
            tokens=_write(state.tokens, jnp.where(going, token, 0)[:, None], column),
            valid=valid,
            loss_mask=_write(state.loss_mask, going[:, None], column),
            logprobs=_write(state.logprobs, jnp.where(going, logprob, 0.0)[:, None], column),
            turn_ids=_write(state.turn_ids, jnp.where(going, turn, -1)[:, None], column),
            lengths=state.lengths + going,
            draws=state.draws + 1,
        )
        ended = ended | (going & (token == tables.eot))
        matched = jnp.where(going, tables.stop[matched, token].astype(jnp.int32), matched)
        return step + 1, state, going & ~ended & (matched != accepted), matched, ended

    carry = (jnp.int32(0), state, active, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool))
    steps, state, _, _, ended = jax.lax.while_loop(unfinished, decode, carry)
    state = state._replace(column=start + steps)
    written = jnp.arange(max_new_tokens)[None, :] < steps
    window = functools.partial(
        jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=max_new_tokens, axis=1
    )
    sampled = window(state.valid) & written
    reply = Reply(
        tokens=jnp.where(sampled, window(state.tokens), 0),
        lengths=jnp.sum(sampled, axis=1, dtype=jnp.int32),
        ended=ended,
    )
    return state, reply


def play_actions(
    env: TextEnv, worlds: Played, actions: Int[Array, "b a"], alive: Bool[Array, "b"], max_actions: int
) -> tuple[Played, Float[Array, "b"], Int[Array, "b a"]]:
    """Execute a turn's actions in order until the episode ends or its actions are spent.

    Returns the worlds, each row's summed reward (float32) and the actions executed, -1 elsewhere.
    """

    def one(carry, action):
        worlds, reward = carry
        act = alive & ~worlds.done & (action >= 0) & (worlds.spent < max_actions)
        stepped, timestep = jax.vmap(env.step)(worlds.states, jnp.maximum(action, 0))
        worlds = Played(
            states=_select(act, stepped, worlds.states),
            done=worlds.done | (act & timestep.last()),
            spent=worlds.spent + act,
        )
        return (worlds, reward + jnp.where(act, timestep.reward, 0.0)), jnp.where(act, action, -1)

    zero = jnp.zeros(actions.shape[0], jnp.float32)
    (worlds, reward), executed = jax.lax.scan(one, (worlds, zero), actions.T)
    return worlds, reward, executed.T


def _select(rows: Bool[Array, "b"], new: Any, old: Any) -> Any:
    """Leaves of `new` where `rows`, of `old` elsewhere; also for typed key arrays."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(rows.reshape(rows.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)


def reset_groups(
    env: TextEnv, level_keys: chex.PRNGKey, member_keys: chex.PRNGKey, group_size: int
) -> tuple[Any, Any]:
    """Initial states of the groups `[g, ...]` and of their members `[g * group_size, ...]`.

    Members share the level; what happens in it later is drawn from each member's own key.
    """
    groups, _ = jax.vmap(env.reset)(level_keys)
    members = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), groups)
    return groups, members._replace(key=member_keys)


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
) -> Trajectory:
    """Play one episode in every row, from the first prompt to the last reward.

    Args:
      model: the policy, in the precision to decode in.
      env, settings: static; `tables` is what `compile_tables` made of them.
      level_keys: one key a group `[g]`: the levels.
      key: everything else that is random.
      temperature: traced; 0 is greedy.
      group_size: members a group.

    Returns:
      The trajectory of `g * group_size` episodes; members of a group are adjacent.
    """
    groups, batch = level_keys.shape[0], level_keys.shape[0] * group_size
    turns, per_turn, budget = settings.max_turns, settings.max_actions_per_turn, settings.max_new_tokens
    member_key, sample_key = jax.random.split(key)
    member_keys, row_keys = jax.random.split(member_key, batch), jax.random.split(sample_key, batch)
    group_states, states = reset_groups(env, level_keys, member_keys, group_size)
    # The head as the decode step reads it, [d, v]; made once, outside the loops.
    head = model.head_weight().T

    def message(states, turn, lacks_end, reward, count):
        slots = turn_slots(
            env,
            settings,
            lacks_end=lacks_end,
            reward=reward,
            turn=turn,
            observation=jax.vmap(env.observe)(states),
            actions_left=settings.max_actions - count,
        )
        return render(tables.turn, slots, tables.turn.max_length)

    first = message(
        group_states,
        jnp.int32(0),
        jnp.zeros(groups, bool),
        jnp.zeros(groups, jnp.float32),
        jnp.zeros(groups, jnp.int32),
    )
    decoding = _open(model, tables, first, group_size, turns * (tables.turn.max_length + budget))

    def play_turn(loop: _Loop) -> _Loop:
        turn, alive = loop.turn, loop.alive
        decoding, reply = generate_turn(
            model,
            head,
            tables,
            loop.decoding,
            alive,
            row_keys,
            turn=turn,
            temperature=temperature,
            max_new_tokens=budget,
        )
        parsed = parse(tables.parser, reply.tokens, reply.lengths)
        possible = jax.vmap(env.valid_actions)(loop.worlds.states)
        named = parsed.actions >= 0
        known = named & jnp.take_along_axis(possible, jnp.maximum(parsed.actions, 0), axis=1)
        unknown = parsed.num_unknown + jnp.sum(named & ~known, axis=1)
        format_valid = alive & parsed.found & jnp.any(known, axis=1) & (unknown == 0)
        worlds, env_reward, executed = play_actions(
            env, loop.worlds, jnp.where(known, parsed.actions, -1), alive, settings.max_actions
        )
        reward = env_reward + jnp.where(alive & ~format_valid, settings.format_penalty, 0.0)
        success = loop.success | (worlds.done & jax.vmap(env.success)(worlds.states))
        end_column = (decoding.column - jnp.max(reply.lengths)) + reply.lengths - 1
        is_end = (jnp.arange(loop.turn_ends.shape[1])[None, :] == end_column[:, None]) & alive[:, None]
        still = alive & ~worlds.done & (worlds.spent < settings.max_actions) & (turn + 1 < turns)

        def next_message(decoding: Decoding) -> Decoding:
            ids, lengths = message(worlds.states, turn + 1, ~reply.ended, env_reward, worlds.spent)
            return append(model, decoding, ids, jnp.where(still, lengths, 0), turn + 1)

        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=turn, axis=1)
        return _Loop(
            turn=turn + 1,
            decoding=jax.lax.cond(jnp.any(still), next_message, lambda d: d, decoding),
            worlds=worlds,
            alive=still,
            turn_ends=loop.turn_ends | is_end,
            turn_rewards=put(loop.turn_rewards, jnp.where(alive, reward, 0.0)),
            env_rewards=put(loop.env_rewards, env_reward),
            turn_played=put(loop.turn_played, alive),
            format_valid=put(loop.format_valid, format_valid),
            actions=put(loop.actions, executed),
            success=success,
            states=_record(loop.states, worlds.states, turn + 1),
        )

    shape = decoding.tokens.shape
    loop = _Loop(
        turn=jnp.int32(0),
        decoding=decoding,
        worlds=Played(states, jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32)),
        alive=jnp.ones(batch, bool),
        turn_ends=jnp.zeros(shape, bool),
        turn_rewards=jnp.zeros((batch, turns), jnp.float32),
        env_rewards=jnp.zeros((batch, turns), jnp.float32),
        turn_played=jnp.zeros((batch, turns), bool),
        format_valid=jnp.zeros((batch, turns), bool),
        actions=jnp.full((batch, turns, per_turn), -1, jnp.int32),
        success=jnp.zeros(batch, bool),
        states=jax.tree.map(lambda x: jnp.stack([x] * (turns + 1)), states),
    )
    # Stops when no episode goes on; `alive` also falls after the last turn.
    loop = jax.lax.while_loop(lambda loop: jnp.any(loop.alive), play_turn, loop)
    done = loop.decoding
    return Trajectory(
        tokens=done.tokens,
        valid=done.valid,
        loss_mask=done.loss_mask,
        behaviour_logprobs=done.logprobs,
        turn_ids=done.turn_ids,
        turn_ends=loop.turn_ends,
        turn_rewards=loop.turn_rewards,
        env_rewards=loop.env_rewards,
        turn_played=loop.turn_played,
        format_valid=loop.format_valid,
        actions=loop.actions,
        success=loop.success,
        states=loop.states,
    )


def _record(history: Any, states: Any, index: Int[Array, ""]) -> Any:
    """Write `states` at `index` and everywhere behind it, so that an episode's last state closes its row."""
    later = jnp.arange(jax.tree.leaves(history)[0].shape[0]) >= index

    def write(old: Array, new: Array) -> Array:
        return jnp.where(later.reshape((-1,) + (1,) * new.ndim), new[None], old)

    return jax.tree.map(write, history, states)


def _open(
    model: CausalLM,
    tables: EpisodeTables,
    first: tuple[Int[Array, "g w"], Int[Array, "g"]],
    group_size: int,
    extra: int,
) -> Decoding:
    """Prefill the system prompt once and the first message once a group, then hand both to every member."""
    ids, lengths = first
    prompt, (groups, width) = tables.prompt, ids.shape
    size = prompt.shape[0]

    def blank(batch: int, columns: int) -> Decoding:
        shape = (batch, columns)
        return Decoding(
            cache=init_cache(model.config, batch, columns, model.backbone.dtype),
            hidden=jnp.zeros((batch, model.config.hidden_size), model.backbone.dtype),
            tokens=jnp.zeros(shape, jnp.int32),
            valid=jnp.zeros(shape, bool),
            loss_mask=jnp.zeros(shape, bool),
            logprobs=jnp.zeros(shape, jnp.float32),
            turn_ids=jnp.full(shape, -1, jnp.int32),
            column=jnp.int32(0),
            lengths=jnp.zeros(batch, jnp.int32),
            draws=jnp.int32(0),
        )

    def spread(small: Decoding, batch: int, columns: int) -> Decoding:
        """Repeat rows and widen columns; scalars stay."""
        big, times = blank(batch, columns), batch // small.tokens.shape[0]

        def copy(source: Array, target: Array) -> Array:
            if source.ndim == 0:
                return source
            return jax.lax.dynamic_update_slice(target, jnp.repeat(source, times, axis=0), (0,) * target.ndim)

        return jax.tree.map(copy, small, big)

    common = append(model, blank(1, size), prompt[None], jnp.full(1, size, jnp.int32), jnp.int32(-1))
    group = append(model, spread(common, groups, size + width), ids, lengths, jnp.int32(0))
    return spread(group, groups * group_size, size + extra)


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
    ) -> None:
        """Raises UserError if the context cannot hold one turn, or all of them."""
        self.columns = tables.prompt.shape[0] + settings.max_turns * (
            tables.turn.max_length + settings.max_new_tokens
        )
        one_turn = tables.prompt.shape[0] + tables.turn.max_length + settings.max_new_tokens
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
            functools.partial(_merged_rollout, env=env, settings=settings, graphdef=graphdef, dtype=dtype),
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
    params, tables, level_keys, key, temperature, *, env, settings, graphdef, dtype, group_size
) -> Trajectory:
    # One cast before the loops: a cast inside them would read the wide weights at every token.
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    model = nnx.merge(graphdef, params)
    return rollout(model, env, settings, tables, level_keys, key, temperature, group_size=group_size)
