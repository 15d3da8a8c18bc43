"""Learning end to end on a tiny program: the warm start, the update, the loop and its exact resume."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.config import ConfigError
from ragen_jax.loggers import read_metrics
from ragen_jax.rollout.episode import system_prompt
from ragen_jax.text.parse import parse_text
from ragen_jax.train.loop import TrainingStopped, train
from ragen_jax.train.program import as_temperature, level_keys, load_model
from ragen_jax.train.sft import demonstrate
from ragen_jax.train.state import begin_reinforcement
from ragen_jax.train.update import bucket, make_update
from tests.programs import program, warm_state


class Silent:
    """Progress that nobody looks at; `stop_after` steps it is killed."""

    def __init__(self, stop_after=None):
        self.said, self.steps, self.stop_after = [], 0, stop_after

    def phase(self, name, total, done):
        pass

    def say(self, line):
        self.said.append(line)

    def advance(self, metrics):
        self.steps += 1
        if self.steps == self.stop_after:
            raise KeyboardInterrupt


def with_run(made, folder, **train_settings):
    """The program of a run of two supervised steps and four iterations in `folder`."""
    config = dataclasses.replace(
        made.config,
        run_dir=str(folder),
        sft=dataclasses.replace(made.config.sft, steps=2),
        train=dataclasses.replace(made.config.train, iterations=4, **train_settings),
    )
    # A run takes the parameters of its program's model, so each run has a model of its own.
    return made._replace(config=config, model=load_model(config)[1])


@functools.cache
def demonstrations(env):
    made = program(env)
    write = jax.jit(functools.partial(demonstrate, made.env, made.settings))
    return jax.device_get(write(made.tables, made.replies, level_keys(0, 16), jax.random.key(0)))


@pytest.mark.parametrize("env", ["bandit", "frozen_lake", "sokoban"])
def test_demonstrations_are_the_tokenizers_ids_and_well_formed(env):
    made, shown = program(env), demonstrations(env)
    frame = made.tokenizer.frame
    opening = made.tokenizer.encode(
        frame.system_open + system_prompt(made.env, made.settings) + frame.system_close
    )
    for tokens, valid, mask in zip(shown.tokens, shown.valid, shown.loss_mask, strict=True):
        assert (np.diff(valid.astype(int)) <= 0).all()  # packed
        assert tokens[: len(opening)].tolist() == opening
        tokens, mask = tokens[valid], mask[valid]
        edges = np.flatnonzero(np.diff(mask.astype(int))) + 1
        parts = np.split(tokens, edges)
        assert not mask[0]
        for message, reply in zip(parts[::2], parts[1::2], strict=True):
            # The whole conversation re-encodes to itself, message by message and reply by reply.
            for part in (message, reply):
                assert made.tokenizer.encode(made.tokenizer.decode(part.tolist())) == part.tolist()
            text = made.settings.reply_prefix + made.tokenizer.decode(reply.tolist())
            parsed = parse_text(
                text.encode(),
                made.env.actions,
                separator=made.settings.separator,
                max_actions=made.settings.max_actions_per_turn,
                think=made.settings.think,
            )
            assert parsed.found
            assert parsed.actions
            assert parsed.num_unknown == 0


def test_bandit_demonstrations_do_not_teach_the_answer():
    made = program("bandit")
    write = jax.jit(functools.partial(demonstrate, made.env, made.settings))
    shown = write(made.tables, made.replies, level_keys(0, 2000), jax.random.key(0))
    assert abs(float(jnp.mean(shown.success)) - 0.5) < 0.05


def played(env, state, seed=0):
    made = program(env)
    rollout = made.config.rollout
    return made.engine(
        state.policy,
        level_keys(seed, rollout.groups),
        jax.random.key(seed),
        as_temperature(1.0),
        group_size=rollout.group_size,
    )


@functools.cache
def updated(**changes):
    """The update of the tiny FrozenLake program with changed `train` settings, on one trajectory."""
    made = program()
    config = dataclasses.replace(made.config, train=dataclasses.replace(made.config.train, **changes))
    start = jax.tree.map(lambda x: x.copy(), begin_reinforcement(config, warm_state(), made.policy))
    update = make_update(config, made.policy, made.critic, made.tables.ban)
    return update(start, played("frozen_lake", warm_state()), made.engine.columns)


def test_microbatches_sum_to_the_minibatch():
    whole, metrics = updated(minibatch=4, microbatch=4)
    parts, metrics_of_parts = updated(minibatch=4, microbatch=1)
    for a, b in zip(jax.tree.leaves(whole.policy), jax.tree.leaves(parts.policy), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for key, value in metrics.items():
        np.testing.assert_allclose(value, metrics_of_parts[key], rtol=1e-3, atol=1e-5, err_msg=key)


def test_the_update_keeps_the_groups_whose_returns_differ_most():
    made = program()
    _, metrics = updated(minibatch=4, microbatch=4)
    returns = np.asarray(played("frozen_lake", warm_state()).turn_rewards).sum(1).reshape(4, -1)
    spread = returns.std(axis=1, ddof=1)
    assert float(metrics["filter/kept_ratio"]) == pytest.approx(made.config.algo.keep_groups)
    np.testing.assert_allclose(metrics["filter/kept_reward_std"], spread.max(), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward/mean"], returns.mean(), atol=1e-5)


def test_before_the_first_step_the_policy_is_the_one_that_sampled():
    _, metrics = updated(minibatch=4, microbatch=4, actor_lr=0.0)
    assert abs(float(metrics["policy/kl_behaviour"])) < 1e-5
    assert float(metrics["policy/clip_fraction"]) == 0


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    made = program()
    start = jax.tree.map(lambda x: x.copy(), begin_reinforcement(made.config, warm_state(), made.policy))
    trajectory = played("frozen_lake", warm_state())
    trajectory = trajectory._replace(turn_rewards=trajectory.turn_rewards * jnp.inf)
    before = jax.device_get((start.policy, start.actor_opt))
    update = make_update(made.config, made.policy, made.critic, made.tables.ban)
    state, metrics = update(start, trajectory, made.engine.columns)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((state.policy, state.actor_opt)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(state.bad_steps) == 2  # both gradient steps of the iteration
    assert float(metrics["update/skipped_steps"]) > 0


def test_a_run_whose_gradients_stay_broken_stops_with_a_sentence(tmp_path):
    made = with_run(program(), tmp_path, max_bad_steps=1)
    broken = jax.tree.map(lambda x: x * jnp.nan, made.model)
    with pytest.raises(TrainingStopped, match="not finite 1 times in a row"):
        train(made._replace(model=broken), Silent())


def test_a_killed_run_resumes_to_the_very_numbers_of_an_uninterrupted_one(tmp_path):
    made = program()
    whole = train(with_run(made, tmp_path / "whole"), Silent())
    # Killed after two supervised steps and three iterations: the last checkpoint is one iteration old.
    with pytest.raises(KeyboardInterrupt):
        train(with_run(made, tmp_path / "killed"), Silent(stop_after=5))
    progress = Silent()
    resumed = train(with_run(made, tmp_path / "killed"), progress)
    assert progress.said == [f"resumed {tmp_path / 'killed'} at step 4"]
    for run in (whole, resumed):
        run.close()

    def numbers(state):
        return jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))

    for a, b in zip(numbers(whole.state), numbers(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)

    def curve(folder):
        timed = ("time/", "throughput/")
        lines = read_metrics(folder / "metrics.jsonl")
        return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]

    assert [line["step"] for line in curve(tmp_path / "whole")] == [0, 1, 2, 3, 4, 5, 6]
    assert curve(tmp_path / "whole") == curve(tmp_path / "killed")
    files = sorted(p.name for p in (tmp_path / "whole" / "rollouts").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "killed" / "rollouts").iterdir())
    for name in files:
        texts = [(tmp_path / run / "rollouts" / name).read_text() for run in ("whole", "killed")]
        assert texts[0] == texts[1]

    # Finished: running again changes nothing.
    again = train(with_run(made, tmp_path / "whole"), Silent())
    assert again.step == 6
    again.close()
    # Another learning rate is another run.
    with pytest.raises(ConfigError, match=r"train\.actor_lr"):
        train(with_run(made, tmp_path / "whole", actor_lr=0.5), Silent())
    # More iterations are not.
    longer = with_run(made, tmp_path / "whole")
    longer.config.train.iterations = 5
    run = train(longer, Silent())
    assert run.step == 7
    run.close()
    check_episodes(tmp_path / "whole" / "rollouts", made)


def check_episodes(folder, made):
    """Written episodes hold what was generated, as text and as tokens, and rewards that add up."""
    seen = 0
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            episode = json.loads(line)
            mask = np.asarray(episode["loss_mask"], bool)
            text = made.tokenizer.decode(episode["tokens"])
            for turn in episode["turns"]:
                assert turn["user"] in text
                assert turn["reply"] in text
                assert turn["board"] in text
            assert len(episode["tokens"]) == len(episode["logprobs"]) == mask.size
            assert (np.asarray(episode["logprobs"])[~mask] == 0).all()
            assert sum(turn["reward"] for turn in episode["turns"]) == pytest.approx(
                episode["return"], abs=1e-3
            )
            seen += 1
    assert seen >= 16


def test_bucket_is_a_width_that_fits():
    assert [bucket(n, 100) for n in (1, 25, 26, 75, 100)] == [25, 25, 50, 75, 100]


def test_reinforcement_finds_the_better_arm():
    """From a policy that pulls both arms alike, StarPO-S learns to pull the one that pays more."""
    made = program("bandit")
    state = begin_reinforcement(made.config, warm_state("bandit"), made.policy)
    state = jax.tree.map(lambda x: x.copy(), state)
    update = make_update(made.config, made.policy, made.critic, made.tables.ban)
    successes = []
    for iteration in range(60):
        trajectory = played("bandit", state, seed=100 + iteration)
        successes.append(float(jnp.mean(trajectory.success)))
        state, _ = update(state, trajectory, made.engine.columns)
    assert np.mean(successes[-10:]) > np.mean(successes[:10]) + 0.2
