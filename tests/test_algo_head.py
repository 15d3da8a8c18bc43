"""The chunked head against the whole one: numbers, gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algo import gather_loss_positions, scatter_positions, token_logprobs

N, D, V = 37, 16, 101


def problem():
    rng = np.random.default_rng(0)
    ban = np.zeros(V, bool)
    ban[[0, 7, 100]] = True
    return {
        "hidden": rng.normal(size=(N, D)).astype(np.float32),
        "head": rng.normal(scale=0.5, size=(V, D)).astype(np.float32),
        "targets": rng.integers(8, 100, size=N).astype(np.int32),
        "ban": ban,
        "weights": rng.normal(size=(2, N)).astype(np.float32),
    }


def whole(hidden, head, targets, *, ban, temperature):
    logits = jnp.where(ban[None, :], -1e30, hidden @ head.T / temperature)
    log_p = jax.nn.log_softmax(logits, axis=1)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
    return jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0], entropy


def test_values_against_a_loop():
    p = problem()

    @jax.jit
    def evaluate(temperature):
        settings = {"ban": p["ban"], "temperature": temperature, "chunk": 8}
        return token_logprobs(p["hidden"], p["head"], p["targets"], **settings)

    got = evaluate(0.7)
    hidden, head, ban = (np.asarray(p[name], np.float64) for name in ("hidden", "head", "ban"))
    for i in range(N):
        kept = {j: hidden[i] @ head[j] / 0.7 for j in range(V) if not ban[j]}
        total = np.log(sum(np.exp(z) for z in kept.values()))
        log_p = {j: z - total for j, z in kept.items()}
        np.testing.assert_allclose(got[0][i], log_p[int(p["targets"][i])], atol=1e-5)
        np.testing.assert_allclose(got[1][i], -sum(np.exp(x) * x for x in log_p.values()), atol=1e-5)


def test_gradients_against_the_whole_softmax():
    p = problem()

    def evaluate(function, **settings):
        def loss(hidden, head, temperature):
            outputs = function(hidden, head, p["targets"], ban=p["ban"], temperature=temperature, **settings)
            return sum(jnp.sum(w * out) for w, out in zip(p["weights"], outputs, strict=True))

        both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        return jax.tree.map(np.asarray, both(p["hidden"], p["head"], np.float32(0.7)))

    expected_loss, (*expected, _) = evaluate(whole)
    for chunk in (1, 8, 64):  # 37 rows: even, with padding, all at once
        loss, (*gradients, temperature_gradient) = evaluate(token_logprobs, chunk=chunk)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        for got, want in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
        assert np.all(gradients[1][p["ban"]] == 0)
        assert temperature_gradient == 0  # a constant, by definition


def test_the_head_gradient_of_bfloat16_is_summed_in_float32():
    # 512 equal rows in chunks of one: a bfloat16 sum would stop growing at 256 times its addend
    hidden, head = jnp.ones((512, 4), jnp.bfloat16), jnp.zeros((2, 4), jnp.bfloat16)

    def loss(head):
        logprobs, _ = token_logprobs(
            hidden, head, jnp.zeros(512, int), ban=jnp.zeros(2, bool), temperature=1.0, chunk=1
        )
        return logprobs.sum()

    gradient = jax.jit(jax.grad(loss))(head)
    assert gradient.dtype == jnp.bfloat16
    assert gradient.tolist() == [[256.0] * 4, [-256.0] * 4]


def test_a_banned_target_stays_finite():
    p = problem()

    @jax.jit
    def evaluate(hidden, head):
        def call(hidden, head):
            return token_logprobs(hidden, head, jnp.zeros(N, int), ban=p["ban"], temperature=1.0, chunk=8)

        (logprobs, entropy), vjp = jax.vjp(call, hidden, head)
        return logprobs, entropy, vjp((jnp.zeros(N), jnp.ones(N)))

    with jax.debug_nans(True):
        logprobs, *others = evaluate(p["hidden"], p["head"])
    assert np.all(np.asarray(logprobs) < -1e29)
    assert all(np.all(np.isfinite(array)) for array in jax.tree.leaves(others))


def test_memory_at_qwens_vocabulary():
    n, d, v = 2048, 64, 151_936
    full = n * v * 4
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [((n, d), "float32"), ((v, d), "float32"), ((n,), "int32"), ((v,), "bool")]
    ]

    def temporaries(function, **settings):
        def loss(hidden, head, targets, ban):
            logprobs, entropy = function(hidden, head, targets, ban=ban, temperature=1.0, **settings)
            return logprobs.sum() + entropy.sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(whole) >= full
    assert temporaries(token_logprobs, chunk=128) < full / 4


@pytest.mark.parametrize("count", [9, 20])
def test_loss_positions_there_and_back(count):
    mask = np.zeros((3, 7), bool)
    mask[0, [2, 3, 6]] = mask[2, [0, 1, 4, 5, 6]] = True
    values = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    indices, real = jax.jit(lambda m: gather_loss_positions(m, count=count))(mask)
    assert indices.shape == real.shape == (count,)
    indices, real = np.asarray(indices), np.asarray(real)
    assert indices[real].tolist() == np.flatnonzero(mask).tolist()
    assert np.all(indices[~real] == 0)

    # what is not real may be anything
    taken = np.where(real, values.reshape(-1)[indices], np.nan)
    cotangent = np.arange(21, dtype=np.float32).reshape(3, 7) + 1

    @jax.jit
    def put(taken):
        placed, vjp = jax.vjp(lambda x: scatter_positions(x, indices, real, (3, 7)), taken)
        return placed, *vjp(cotangent)

    placed, gradient = put(taken)
    np.testing.assert_array_equal(placed, np.where(mask, values, 0))
    np.testing.assert_array_equal(gradient, np.where(real, cotangent.reshape(-1)[indices], 0))


def test_no_loss_positions_at_all():
    @jax.jit
    def there_and_back(mask):
        indices, real = gather_loss_positions(mask, count=4)
        return scatter_positions(jnp.ones(4), indices, real, mask.shape)

    np.testing.assert_array_equal(there_and_back(np.zeros((2, 3), bool)), 0)


def test_the_head_on_loss_positions_is_the_head_on_all():
    p = problem()
    mask = (np.arange(36) % 3 == 0).reshape(4, 9)
    mask[:, 0] = False  # the first column has no column before it

    @jax.jit
    def evaluate(hidden, tokens, mask):
        settings = {"ban": p["ban"], "temperature": 1.0, "chunk": 8}
        indices, real = gather_loss_positions(mask, count=16)
        before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))).reshape(-1, D)
        tokens = tokens.reshape(-1)
        some, _ = token_logprobs(before[indices], p["head"], tokens[indices], **settings)
        every, _ = token_logprobs(before, p["head"], tokens, **settings)
        return scatter_positions(some, indices, real, mask.shape), every.reshape(mask.shape)

    some, every = evaluate(p["hidden"][:36].reshape(4, 9, D), p["targets"][:36].reshape(4, 9), mask)
    np.testing.assert_allclose(some, np.where(mask, every, 0), atol=1e-6)
