"""The same folder gives the same logits and the same greedy text in transformers and here, both ways."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models import CausalLM, Llama3Scaling, ModelConfig, init_cache
from ragen_jax.models.hf import load_pretrained, save_pretrained

torch = pytest.importorskip("torch", reason="needs torch: pip install 'ragen-jax[parity]'")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

VOCAB, PROMPT, NEW = 61, 16, 64
FAMILIES = ("qwen2", "qwen3", "llama")
SCALING = Llama3Scaling(8.0, 1.0, 4.0, 32)  # short enough that all three branches occur at head_dim 16
CASES = [(family, tied) for family in FAMILIES for tied in (True, False)]


def tiny(family: str, tied: bool) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16 if family != "qwen2" else 8,
        rope_theta=1e4,
        rope_scaling=SCALING if family == "llama" else None,
        norm_eps=1e-6,
        tie_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_position=256,
    )


def torch_folder(config: ModelConfig, folder):
    """A transformers model with every parameter random, saved by transformers in its own spelling."""
    torch.manual_seed(0)
    hf_config = transformers.AutoConfig.for_model(**config.to_hf())
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.generation_config.eos_token_id = None  # Llama's is 2; greedy text should run to its full length
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (2, PROMPT + NEW)).astype(np.int32)


def torch_logits(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.numpy()


@nnx.jit
def logits(model: CausalLM, ids, positions):
    return model.logits(model(ids, positions, jnp.ones(ids.shape, bool)))


def jax_logits(model: CausalLM, ids: np.ndarray) -> np.ndarray:
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32)[None], ids.shape)
    return np.asarray(logits(model, ids, positions))


@functools.partial(nnx.jit, static_argnames="new")
def greedy(model: CausalLM, prompt, *, new: int):
    """`new` most likely tokens after the prompt, decoded on the cache."""
    batch, length = prompt.shape
    columns = jnp.arange(length + new)
    cache = init_cache(model.config, batch, length + new, jnp.float32)

    def visible(end):
        return jnp.broadcast_to((columns < end)[None], (batch, length + new))

    def pick(hidden):
        return jnp.argmax(model.logits(hidden[:, -1]), axis=-1).astype(jnp.int32)

    positions = jnp.broadcast_to(jnp.arange(length)[None], prompt.shape)
    hidden, cache = model.extend(prompt, positions, cache, 0, visible(length))
    graph, state = nnx.split(model)

    def step(carry, column):
        token, cache = carry
        positions = jnp.full((batch, 1), column)
        inner = nnx.merge(graph, state)
        hidden, cache = inner.extend(token[:, None], positions, cache, column, visible(column + 1))
        return (pick(hidden), cache), token

    _, generated = jax.lax.scan(step, (pick(hidden), cache), length + jnp.arange(new))
    return generated.T


def torch_greedy(model, prompt: np.ndarray) -> np.ndarray:
    ids = torch.tensor(prompt, dtype=torch.long)
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[:, ids.shape[1] :].numpy()


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_folder_of_transformers_gives_its_logits_and_greedy_text(tmp_path, family, tied):
    config = tiny(family, tied)
    theirs = torch_folder(config, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load_pretrained(tmp_path)
    assert ours.config == config
    ids = tokens()
    error = np.abs(jax_logits(ours, ids) - torch_logits(theirs, ids)).max()
    print(f"{family} tied={tied}: largest logit difference {error:.1e}")
    assert error < 1e-4
    prompt = ids[:, :PROMPT]
    text = np.asarray(greedy(ours, prompt, new=NEW))
    np.testing.assert_array_equal(text, torch_greedy(theirs, prompt))
    assert len(np.unique(text)) > 3  # not one token for ever


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_exported_folder_gives_its_logits_in_transformers(tmp_path, family, tied):
    rng = np.random.default_rng(1)
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(tiny(family, tied), rngs=nnx.Rngs(0))))
    for path, leaf in nnx.to_flat_state(state):
        centre = 1.0 if path[-1] == "weight" else 0.0
        leaf.set_value(jnp.asarray(rng.normal(centre, 0.15, leaf.shape).astype(np.float32)))
    ours = nnx.merge(graph, state)
    save_pretrained(ours, tmp_path, max_shard_bytes=10**9 if tied else 60_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert theirs.dtype == torch.float32
    assert theirs.generation_config.eos_token_id is None  # none was given, and no default invented
    ids = tokens()
    error = np.abs(jax_logits(ours, ids) - torch_logits(theirs.eval(), ids)).max()
    print(f"{family} tied={tied}: largest logit difference {error:.1e}")
    assert error < 1e-4
