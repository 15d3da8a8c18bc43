"""The sampler against the distribution it claims to draw from."""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.rollout.sampling import restrict, row_uniforms, sample


def test_frequencies_match_softmax_and_logprobs_are_its_logarithm():
    vocab, draws = 700, 40_000
    logits = 2 * jax.random.normal(jax.random.key(0), (1, vocab))
    ban = jnp.zeros(vocab, bool).at[jnp.array([3, 256, 699])].set(True)
    tempered = restrict(logits, ban=ban, temperature=0.7)
    expected = np.exp(np.asarray(logits[0], np.float64) / 0.7) * ~np.asarray(ban)
    expected /= expected.sum()
    uniforms = jax.random.uniform(jax.random.key(1), (draws,))
    tokens, logprobs = jax.jit(sample)(jnp.broadcast_to(tempered, (draws, vocab)), uniforms)
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    assert counts[np.asarray(ban)].sum() == 0
    np.testing.assert_allclose(np.asarray(logprobs), np.log(expected[np.asarray(tokens)]), atol=1e-4)
    likely = expected > 0.002
    error = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(counts / draws - expected)[likely] < 5 * error[likely]).all()


def test_extreme_uniforms_never_pick_a_token_without_mass():
    vocab = 513
    ban = jnp.ones(vocab, bool).at[jnp.array([0, 300])].set(False)
    logits = restrict(jnp.zeros((3, vocab)), ban=ban, temperature=1.0)
    tokens, logprobs = sample(logits, jnp.array([0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))]))
    assert tokens.tolist() == [0, 300, 300]
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def test_greedy_takes_the_most_likely():
    logits = jax.random.normal(jax.random.key(2), (8, 300))
    tokens, _ = sample(logits, jnp.full(8, 0.99), greedy=True)
    assert tokens.tolist() == np.argmax(logits, axis=1).tolist()


def test_a_rows_draw_does_not_depend_on_the_batch():
    keys = jax.random.split(jax.random.key(3), 6)
    whole = row_uniforms(keys, jnp.arange(4, 9))
    assert (whole[2:5, 1:3] == row_uniforms(keys[2:5], jnp.arange(5, 7))).all()
    assert len(set(whole.ravel().tolist())) == 30
