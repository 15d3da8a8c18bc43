"""The engine against what can be recomputed outside it: log-probabilities, text, rules, parsing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.rollout.engine import Engine, rollout
from ragen_jax.rollout.episode import turn_template
from ragen_jax.text.parse import parse_text
from ragen_jax.train.program import as_temperature, level_keys
from ragen_jax.train.update import Forward, pack
from tests.programs import program, warm_state

ENVS = ["bandit", "frozen_lake", "sokoban"]


@functools.cache
def played(env: str, seed: int = 0):
    made = program(env)
    return made.engine(
        warm_state(env).policy,
        level_keys(seed, made.config.rollout.groups),
        jax.random.key(seed),
        as_temperature(1.0),
        group_size=made.config.rollout.group_size,
    )


@pytest.mark.parametrize("env", ENVS)
def test_recorded_logprobs_equal_one_full_forward_pass(env):
    made, trajectory = program(env), played(env)
    batch = pack(trajectory, trajectory.tokens.shape[1])
    forward = Forward(made.config, made.policy, None, made.tables.ban, 1.0)
    logprobs, _ = jax.jit(forward.logprobs)(
        warm_state(env).policy, batch.tokens, batch.valid, batch.loss_mask
    )
    mask = np.asarray(batch.loss_mask)
    assert mask.sum() > 100
    assert np.abs(np.asarray(batch.behaviour_logprobs))[mask].max() > 0.1
    np.testing.assert_allclose(
        np.asarray(logprobs)[mask], np.asarray(batch.behaviour_logprobs)[mask], atol=1e-4
    )


@pytest.mark.parametrize("env", ENVS)
def test_messages_equal_the_host_tokenizers_ids(env):
    """Every message that the device wrote, rebuilt from the recorded worlds and encoded by the tokenizer."""
    made, trajectory = program(env), jax.device_get(played(env)._replace(states=None))
    states = played(env).states
    tokenizer, settings = made.tokenizer, made.settings
    template = turn_template(made.env, settings, tokenizer)
    rows, checked = trajectory.tokens.shape[0], 0
    for row in range(rows):
        spent, lacks_end, reward_text = 0, False, ""
        for turn in range(int(trajectory.turn_played[row].sum())):
            state = jax.tree.map(lambda x: x[turn, row], states)  # noqa: B023
            observation = made.env.observe(state).tolist()
            # Not turn_slots: the text is spelt out here from the numbers themselves.
            text = template.render_text([0, 0, turn, *observation, settings.max_actions - spent])
            head, tail = text.split("Turn", 1)
            text = head + reward_text + "Turn" + tail
            if lacks_end:
                text = tokenizer.frame.eot + text
            here = (trajectory.turn_ids[row] == turn) & trajectory.valid[row]
            ids = trajectory.tokens[row][here & ~trajectory.loss_mask[row]].tolist()
            assert ids == tokenizer.encode(text)
            reply = trajectory.tokens[row][here & trajectory.loss_mask[row]].tolist()
            lacks_end = tokenizer.eot_id not in reply
            spent += int((trajectory.actions[row, turn] >= 0).sum())
            reward_text = f"Reward: {trajectory.env_rewards[row, turn]:.1f}\n".replace("-0.0", "0.0")
            checked += 1
    assert checked >= rows


@pytest.mark.parametrize("env", ENVS)
def test_replies_are_parsed_and_worlds_stepped_as_on_the_host(env):
    made, trajectory = program(env), jax.device_get(played(env)._replace(states=None))
    states, settings = played(env).states, made.settings
    bytes_of = made.tokenizer.token_text
    step = jax.jit(made.env.step)
    kinds = set()
    for row in range(trajectory.tokens.shape[0]):
        spent, done = 0, False
        for turn in range(settings.max_turns):
            if not trajectory.turn_played[row, turn]:
                assert done or spent >= settings.max_actions
                assert trajectory.turn_rewards[row, turn] == 0
                continue
            assert not done
            here = (trajectory.turn_ids[row] == turn) & trajectory.loss_mask[row]
            reply = [i for i in trajectory.tokens[row][here].tolist() if i != made.tokenizer.eot_id]
            text = settings.reply_prefix.encode() + b"".join(bytes_of(i) for i in reply)
            parsed = parse_text(
                text,
                made.env.actions,
                separator=settings.separator,
                max_actions=settings.max_actions_per_turn,
                think=settings.think,
            )
            state = jax.tree.map(lambda x: x[turn, row], states)  # noqa: B023
            possible = np.asarray(made.env.valid_actions(state))
            known = [a for a in parsed.actions if possible[a]]
            unknown = parsed.num_unknown + len(parsed.actions) - len(known)
            valid = parsed.found and bool(known) and unknown == 0
            kinds.add(valid)
            assert bool(trajectory.format_valid[row, turn]) == valid
            reward, executed = 0.0, []
            for action in known:
                if done or spent >= settings.max_actions:
                    break
                state, timestep = step(state, jnp.int32(action))
                reward, spent, done = reward + float(timestep.reward), spent + 1, bool(timestep.last())
                executed.append(action)
            np.testing.assert_allclose(trajectory.env_rewards[row, turn], reward, atol=1e-6)
            penalty = 0.0 if valid else settings.format_penalty
            np.testing.assert_allclose(trajectory.turn_rewards[row, turn], reward + penalty, atol=1e-6)
            assert [a for a in trajectory.actions[row, turn].tolist() if a >= 0] == executed
            after = jax.tree.map(lambda x: x[turn + 1, row], states)  # noqa: B023
            assert made.env.describe(after) == made.env.describe(state)
        assert bool(trajectory.success[row]) == (done and bool(made.env.success(state)))
    assert True in kinds  # the warm start has taught the format, so the rules are exercised


def test_a_rollout_compiles_once_and_stays_on_the_device():
    made = program()
    traced = chex.assert_max_traces(rollout, n=1)
    graph = made.policy

    @functools.partial(jax.jit, static_argnames="group_size")
    def play(params, tables, keys, key, temperature, *, group_size):
        model = nnx.merge(graph, params)
        return traced(model, made.env, made.settings, tables, keys, key, temperature, group_size=group_size)

    arguments = [
        (level_keys(seed, 4), jax.random.key(seed), as_temperature(temperature))
        for seed, temperature in [(0, 1.0), (1, 0.5), (2, 0.0)]
    ]
    params, tables = warm_state().policy, made.tables
    jax.block_until_ready(play(params, tables, *arguments[0], group_size=4))
    with jax.transfer_guard("disallow"):
        results = [play(params, tables, *a, group_size=4) for a in arguments]
        jax.block_until_ready(results)
    assert len({np.asarray(r.tokens).tobytes() for r in results}) == 3


def test_members_share_the_level_and_differ_in_what_follows():
    made, trajectory = program(), played("frozen_lake")
    size = made.config.rollout.group_size
    first = jax.tree.map(lambda x: x[0], trajectory.states)
    boards = [made.env.describe(jax.tree.map(lambda x: x[i], first)) for i in range(4 * size)]  # noqa: B023
    groups = [boards[i : i + size] for i in range(0, len(boards), size)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups}) > 1
    keys = jax.random.key_data(first.key)
    assert len({np.asarray(k).tobytes() for k in keys}) == 4 * size


def test_the_buffers_are_consistent():
    trajectory = jax.device_get(played("frozen_lake")._replace(states=None))
    assert not (trajectory.loss_mask & ~trajectory.valid).any()
    assert (trajectory.behaviour_logprobs[~trajectory.loss_mask] == 0).all()
    assert (trajectory.behaviour_logprobs[trajectory.loss_mask] <= 0).all()
    # One recorded end a played turn, on that turn's last sampled token.
    assert (trajectory.turn_ends.sum(1) == trajectory.turn_played.sum(1)).all()
    for row in range(trajectory.tokens.shape[0]):
        for turn in np.flatnonzero(trajectory.turn_played[row]):
            sampled = np.flatnonzero(trajectory.loss_mask[row] & (trajectory.turn_ids[row] == turn))
            ends = np.flatnonzero(trajectory.turn_ends[row] & (trajectory.turn_ids[row] == turn))
            assert ends.tolist() == [sampled[-1]]


def test_banned_tokens_are_never_sampled():
    made, trajectory = program(), played("frozen_lake")
    sampled = np.asarray(trajectory.tokens)[np.asarray(trajectory.loss_mask)]
    assert not np.asarray(made.tables.ban)[sampled].any()


def test_greedy_is_deterministic_across_keys():
    made = program("bandit")
    runs = [
        made.engine(
            warm_state("bandit").policy,
            level_keys(5, 4),
            jax.random.key(k),
            as_temperature(0.0),
            group_size=4,
        )
        for k in (1, 2)
    ]
    assert (runs[0].tokens == runs[1].tokens).all()
    assert (runs[0].loss_mask == runs[1].loss_mask).all()


@pytest.mark.parametrize(("block", "stages"), [(0, 3), (4, 2)])
def test_episodes_do_not_depend_on_block_and_stages(block, stages):
    """Blocks skip finished episodes, stages unwritten columns; what every episode is stays the same."""
    made, whole = program(), jax.device_get(played("frozen_lake")._replace(states=None))
    engine = Engine(
        made.env,
        made.settings,
        made.tables,
        made.policy,
        dtype=jnp.float32,
        max_context=made.config.rollout.context,
        block=block,
        stages=stages,
    )
    rollout_config = made.config.rollout
    parts = engine(
        warm_state().policy,
        level_keys(0, rollout_config.groups),
        jax.random.key(0),
        as_temperature(1.0),
        group_size=rollout_config.group_size,
    )
    assert 0 < whole.turn_played[:, -1].sum() < len(whole.turn_played)  # some finish early, some do not
    for name, values in whole._asdict().items():
        if name == "behaviour_logprobs":
            np.testing.assert_allclose(getattr(parts, name), values, atol=1e-5)
        elif values is not None:
            np.testing.assert_array_equal(getattr(parts, name), values, err_msg=name)
