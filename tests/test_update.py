"""Every algorithm setting reaches its place in the update: plain formulas on a stand-in model.

The estimators and losses themselves are checked in test_algo_*; here it is what the update feeds them.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ragen_jax.models.transformer import Critic
from ragen_jax.train.state import TrainState, actor_optimizer, critic_optimizer
from ragen_jax.train.update import Forward, Targets, estimate, gradient_step
from ragen_jax.types import Batch
from tests.programs import program, tiny_config

ROWS, COLUMNS = 8, 12
RNG = np.random.default_rng(0)
MASK = RNG.random((ROWS, COLUMNS)) < 0.5
MASK[:, -1] = True


def draw(scale=1.0):
    return jnp.asarray(np.where(MASK, RNG.normal(scale=scale, size=MASK.shape), 0.0), jnp.float32)


BATCH = Batch(
    tokens=jnp.asarray(RNG.integers(1, 50, MASK.shape), jnp.int32),
    valid=jnp.ones(MASK.shape, bool),
    loss_mask=jnp.asarray(MASK),
    behaviour_logprobs=draw(0.5) - 0.5 * MASK,
    rewards=draw(),
    returns=jnp.asarray(RNG.normal(size=ROWS), jnp.float32),
)


class StandIn:
    """A policy and critic of one number each, in place of `Forward`."""

    def logprobs(self, params, tokens, valid, mask):
        x = tokens.astype(jnp.float32)
        return jnp.where(mask, params["w"] * jnp.sin(x), 0.0), jnp.where(mask, params["w"] ** 2 * x / 9, 0.0)

    def values(self, params, tokens, valid):
        return params["w"] * jnp.cos(tokens.astype(jnp.float32))


def config_with(train=None, **algo):
    config = tiny_config()
    train = dataclasses.replace(config.train, microbatch=2, **(train or {}))
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, **algo), train=train)


def state_of(config):
    policy, critic = {"w": jnp.float32(0.7)}, {"w": jnp.float32(0.4)}
    return TrainState(
        iteration=jnp.int32(0),
        sft_step=jnp.int32(0),
        key=jax.random.key(0),
        policy=policy,
        critic=critic,
        reference=None,
        actor_opt=actor_optimizer(config).init(policy),
        critic_opt=critic_optimizer(config).init(critic),
        bad_steps=jnp.int32(0),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_coef": 0.0, "aggregation": "token_mean"},
        {"kl_coef": 0.7, "kl_kind": "k3", "aggregation": "sequence_mean_token_mean"},
        {"kl_coef": 0.7, "kl_kind": "k1", "aggregation": "sequence_mean_token_sum"},
    ],
)
def test_a_gradient_step_is_that_of_the_plain_loss(settings):
    common = {"clip_low": 0.05, "clip_high": 0.4, "dual_clip": 1.5, "entropy_coef": 0.3, "value_clip": 0.2}
    config, targets = config_with(**common, **settings), Targets(draw(), draw(), draw(), draw())
    state, forward = state_of(config), StandIn()
    _, metrics = jax.jit(lambda s: gradient_step(config, forward, s, BATCH, targets))(state)
    weights = {
        "token_mean": MASK / MASK.sum(),
        "sequence_mean_token_mean": MASK / MASK.sum(1, keepdims=True) / ROWS,
        "sequence_mean_token_sum": MASK / (ROWS * config.rollout.max_turns * config.rollout.max_new_tokens),
    }[settings["aggregation"]]

    def parts(params):
        logprobs, entropy = forward.logprobs(params, BATCH.tokens, BATCH.valid, MASK)
        ratio, a = jnp.exp(logprobs - BATCH.behaviour_logprobs), targets.advantages
        loss = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.95, 1.4))
        loss = jnp.where(a < 0, jnp.minimum(loss, -1.5 * a), loss)
        d = logprobs - targets.reference_logprobs
        kl = jnp.exp(-d) - 1 + d if settings.get("kl_kind") == "k3" else 0.0 * d
        return [jnp.sum(weights * x) for x in (loss, entropy, kl)]

    def total(params):
        loss, entropy, kl = parts(params)
        return loss - 0.3 * entropy + settings["kl_coef"] * kl

    def critic_total(params):
        v, old = forward.values(params, BATCH.tokens, BATCH.valid), targets.values
        near = old + jnp.clip(v - old, -0.2, 0.2)
        error = jnp.maximum((v - targets.returns) ** 2, (near - targets.returns) ** 2)
        return jnp.sum(weights * 0.5 * error)

    loss, entropy, _ = parts(state.policy)
    expected = {
        "policy/loss": loss,
        "policy/entropy": entropy,
        "policy/grad_norm": optax.tree.norm(jax.grad(total)(state.policy)),
        "critic/loss": critic_total(state.critic),
        "critic/grad_norm": optax.tree.norm(jax.grad(critic_total)(state.critic)),
    }
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, err_msg=key)
    assert float(metrics["policy/clip_fraction"]) > 0


def test_each_network_steps_at_its_own_rate():
    config = config_with(train={"actor_lr": 1e-3, "critic_lr": 1e-2})
    state = state_of(config)
    after, _ = gradient_step(config, StandIn(), state, BATCH, Targets(draw(), draw(), draw(), draw()))
    # Adam's first step is the learning rate, whatever the gradient's size.
    assert abs(float(after.policy["w"] - state.policy["w"])) == pytest.approx(1e-3, rel=1e-2)
    assert abs(float(after.critic["w"] - state.critic["w"])) == pytest.approx(1e-2, rel=1e-2)


def advantages_by_loop(rewards, values, gamma, lam):
    out = np.zeros(MASK.shape)
    for row in range(ROWS):
        following, value_next = 0.0, 0.0
        for t in reversed(np.flatnonzero(MASK[row])):
            following = rewards[row, t] + gamma * value_next - values[row, t] + gamma * lam * following
            out[row, t], value_next = following, values[row, t]
    return out


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("whiten", [False, True])
def test_targets_with_a_critic(kind, whiten):
    config = config_with(estimator="gae", kl_coef=0.6, kl_kind=kind, gamma=0.9, lam=0.8, whiten=whiten)
    state = types.SimpleNamespace(reference={"w": jnp.float32(0.3)}, critic={"w": jnp.float32(0.5)})
    targets = estimate(config, StandIn(), state, BATCH)
    x = np.asarray(BATCH.tokens, np.float64)
    values, reference = 0.5 * np.cos(x), np.where(MASK, 0.3 * np.sin(x), 0.0)
    penalty = 0.6 * (np.asarray(BATCH.behaviour_logprobs) - reference) * MASK if kind == "k1" else 0.0
    plain = advantages_by_loop(np.asarray(BATCH.rewards) - penalty, values, 0.9, 0.8)
    np.testing.assert_allclose(targets.returns, np.where(MASK, plain + values, 0), atol=1e-5)
    np.testing.assert_allclose(targets.reference_logprobs, reference, atol=1e-6)
    np.testing.assert_allclose(np.where(MASK, targets.values - values, 0), 0, atol=1e-6)
    if whiten:
        plain = np.where(MASK, (plain - plain[MASK].mean()) / plain[MASK].std(ddof=1), 0)
    np.testing.assert_allclose(targets.advantages, plain, atol=1e-5)


def test_targets_of_groups():
    config = config_with(estimator="grpo", kl_coef=0.6, kl_kind="k1", whiten=True)
    state = types.SimpleNamespace(reference={"w": jnp.float32(0.3)}, critic=None)
    targets = estimate(config, StandIn(), state, BATCH)
    reference = np.where(MASK, 0.3 * np.sin(np.asarray(BATCH.tokens)), 0.0)
    penalty = 0.6 * ((np.asarray(BATCH.behaviour_logprobs) - reference) * MASK).sum(1)
    returns = (np.asarray(BATCH.returns) - penalty).reshape(-1, config.rollout.group_size)
    scaled = (returns - returns.mean(1, keepdims=True)) / returns.std(1, ddof=1, keepdims=True)
    np.testing.assert_allclose(targets.advantages, MASK * scaled.reshape(-1, 1), atol=1e-4)


def test_values_and_entropies_speak_of_the_token_that_follows():
    """Column t holds the value of what lies before token t, and the entropy of the draw that gave it."""
    made = program()
    critic = nnx.eval_shape(lambda: Critic(made.model.config, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(critic)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    params = jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape), shapes)
    policy = nnx.state(made.model)
    forward = Forward(made.config, made.policy, graph, made.tables.ban, 0.7)
    values = jax.jit(forward.values)(params, BATCH.tokens, BATCH.valid)
    positions = jnp.broadcast_to(jnp.arange(COLUMNS)[None], MASK.shape)
    direct = jax.jit(lambda p: nnx.merge(graph, p)(BATCH.tokens, positions, BATCH.valid))(params)
    np.testing.assert_allclose(values[:, 1:], direct[:, :-1], atol=1e-5)
    assert (values[:, 0] == 0).all()
    assert float(jnp.std(direct)) > 0.01

    mask = BATCH.loss_mask.at[:, 0].set(False)
    logprobs, entropy = jax.jit(forward.logprobs)(policy, BATCH.tokens, BATCH.valid, mask)

    @jax.jit
    def plain_logits(params):
        model = nnx.merge(made.policy, params)
        return model.logits(model(BATCH.tokens, positions, BATCH.valid)) / 0.7

    logits = plain_logits(policy)
    table = jax.nn.log_softmax(jnp.where(made.tables.ban[None, None], -1e30, logits), axis=-1)[:, :-1]
    taken = jnp.take_along_axis(table, BATCH.tokens[:, 1:, None], axis=2)[:, :, 0]
    spread = -jnp.sum(jnp.exp(table) * table, axis=-1)
    for got, want in ((logprobs, taken), (entropy, spread)):
        np.testing.assert_allclose(got[:, 1:], jnp.where(mask[:, 1:], want, 0), atol=1e-4)
        assert (got[:, 0] == 0).all()
