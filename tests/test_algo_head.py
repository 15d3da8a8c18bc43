"""The chunked head against the whole one: numbers, gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algo import gather_loss_positions, scatter_positions, token_logprobs

N, D, V = 37, 16, 101


def problem(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 5)
    ban = jnp.zeros(V, bool).at[jnp.array([0, 7, 100])].set(True)
    return {
        "hidden": jax.random.normal(keys[0], (N, D)).astype(dtype),
        "head": (0.5 * jax.random.normal(keys[1], (V, D))).astype(dtype),
        "targets": jax.random.randint(keys[2], (N,), 8, 100),
        "ban": ban,
        "weights": jax.random.normal(keys[3], (2, N)),
    }


def whole(hidden, head, targets, *, ban, temperature):
    logits = jnp.where(ban[None, :], -1e30, hidden @ head.T / temperature)
    log_p = jax.nn.log_softmax(logits, axis=1)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
    return jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0], entropy


def test_values_against_a_loop():
    p = problem()
    got = jax.jit(
        lambda t: token_logprobs(p["hidden"], p["head"], p["targets"], ban=p["ban"], temperature=t, chunk=8)
    )(0.7)
    hidden, head, ban = (np.asarray(p[name], np.float64) for name in ("hidden", "head", "ban"))
    for i in range(N):
        kept = {j: hidden[i] @ head[j] / 0.7 for j in range(V) if not ban[j]}
        total = np.log(sum(np.exp(z) for z in kept.values()))
        log_p = {j: z - total for j, z in kept.items()}
        np.testing.assert_allclose(got[0][i], log_p[int(p["targets"][i])], atol=1e-5)
        np.testing.assert_allclose(got[1][i], -sum(np.exp(x) * x for x in log_p.values()), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 8, 37, 64])
def test_gradients_against_the_whole_softmax(chunk):
    p = problem()

    def loss(function, **settings):
        def call(hidden, head, temperature):
            outputs = function(hidden, head, p["targets"], ban=p["ban"], temperature=temperature, **settings)
            return sum(jnp.sum(w * out) for w, out in zip(p["weights"], outputs, strict=True))

        return jax.jit(jax.value_and_grad(call, argnums=(0, 1)))

    temperature = jnp.float32(0.7)
    got = loss(token_logprobs, chunk=chunk)(p["hidden"], p["head"], temperature)
    expected = loss(whole)(p["hidden"], p["head"], temperature)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), got, expected)
    assert np.all(np.asarray(got[1][1])[np.asarray(p["ban"])] == 0)


def test_the_head_gradient_of_bfloat16_is_summed_in_float32():
    # 512 equal rows in chunks of one: a bfloat16 sum would stop growing at 256 times its addend
    hidden, head = jnp.ones((512, 4), jnp.bfloat16), jnp.zeros((2, 4), jnp.bfloat16)

    def loss(head):
        logprobs, _ = token_logprobs(
            hidden, head, jnp.zeros(512, int), ban=jnp.zeros(2, bool), temperature=1.0, chunk=1
        )
        return logprobs.sum()

    gradient = jax.grad(loss)(head)
    assert gradient.dtype == jnp.bfloat16
    assert gradient.tolist() == [[256.0] * 4, [-256.0] * 4]


def test_temperature_is_a_constant():
    p = problem()
    gradient = jax.grad(
        lambda t: token_logprobs(p["hidden"], p["head"], p["targets"], ban=p["ban"], temperature=t, chunk=8)[
            0
        ].sum()
    )(0.7)
    assert float(gradient) == 0.0


def test_a_banned_target_stays_finite():
    p = problem()
    with jax.debug_nans(True):
        (logprobs, entropy), vjp = jax.vjp(
            lambda h, w: token_logprobs(h, w, jnp.zeros(N, int), ban=p["ban"], temperature=1.0, chunk=8),
            p["hidden"],
            p["head"],
        )
        gradients = vjp((jnp.zeros(N), jnp.ones(N)))
    assert np.all(np.asarray(logprobs) < -1e29)
    for array in (entropy, *gradients):
        assert jnp.all(jnp.isfinite(array))


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
    assert indices[real].tolist() == np.flatnonzero(mask).tolist()
    assert np.all(np.asarray(indices)[~np.asarray(real)] == 0)

    taken = jnp.where(real, values.reshape(-1)[indices], jnp.nan)

    def put(taken):
        return scatter_positions(taken, indices, real, (3, 7))

    np.testing.assert_array_equal(jax.jit(put)(taken), np.where(mask, values, 0))
    cotangent = np.arange(21, dtype=np.float32).reshape(3, 7) + 1
    gradient = jax.grad(lambda x: jnp.sum(cotangent * put(x)))(taken)
    np.testing.assert_array_equal(gradient, np.where(real, cotangent.reshape(-1)[indices], 0))


def test_no_loss_positions_at_all():
    indices, real = gather_loss_positions(jnp.zeros((2, 3), bool), count=4)
    assert not real.any()
    assert jnp.all(scatter_positions(jnp.ones(4), indices, real, (2, 3)) == 0)


def test_the_head_on_loss_positions_is_the_head_on_all():
    p = problem()
    mask = (np.arange(36) % 3 == 0).reshape(4, 9)
    mask[:, 0] = False  # the first column has no column before it
    hidden, tokens = p["hidden"][:36].reshape(4, 9, D), p["targets"][:36].reshape(4, 9)
    settings = {"ban": p["ban"], "temperature": 1.0, "chunk": 8}
    indices, real = gather_loss_positions(jnp.asarray(mask), count=16)
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))).reshape(-1, D)
    some, _ = token_logprobs(before[indices], p["head"], tokens.reshape(-1)[indices], **settings)
    every, _ = token_logprobs(before, p["head"], tokens.reshape(-1), **settings)
    np.testing.assert_allclose(
        scatter_positions(some, indices, real, (4, 9)), np.where(mask, every.reshape(4, 9), 0), atol=1e-6
    )
