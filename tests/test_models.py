"""The transformer against itself (cache against no cache, padding against none) and its folders on disk."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx

from ragen_jax.models import CausalLM, Critic, Llama3Scaling, ModelConfig, init_cache
from ragen_jax.models.hf import ModelFolderError, key_table, load_pretrained, save_pretrained

VOCAB, COLUMNS = 61, 24
TIED = {"qwen2": True, "qwen3": False, "llama": True}
SCALING = Llama3Scaling(8.0, 1.0, 4.0, 64)


def tiny(family: str, **changes) -> ModelConfig:
    sizes = {
        "family": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,  # not hidden / heads
        "tie_embeddings": TIED[family],
        "rope_scaling": SCALING if family == "llama" else None,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
    }
    return ModelConfig(**(sizes | changes))


def random_model(config: ModelConfig, **dtypes) -> CausalLM:
    """Every parameter random, norms and biases too, as fresh ones would hide a swapped pair."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0), **dtypes)))

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "weight" else 0.0
        return jnp.asarray(rng.normal(centre, 0.1, leaf.shape).astype(leaf.dtype))

    pure = jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graph, state)


@functools.cache
def model_of(family: str) -> CausalLM:
    return random_model(tiny(family))


@nnx.jit
def full(model, tokens, positions, valid):
    return model(tokens, positions, valid)


@nnx.jit
def extend(model, tokens, positions, cache, column, valid):
    return model.extend(tokens, positions, cache, column, valid)


@nnx.jit
def extend_last(model, tokens, positions, cache, column, valid):
    return model.extend(tokens, positions, cache, column, valid, last=2)


def packed(lengths: list[int], width: int, seed: int = 0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (len(lengths), width)).astype(np.int32)
    valid = np.arange(width)[None] < np.array(lengths)[:, None]
    positions = np.broadcast_to(np.arange(width, dtype=np.int32)[None], tokens.shape)
    return jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(valid)


@pytest.mark.parametrize("family", TIED)
def test_ragged_multi_step_extends_equal_the_full_forward(family):
    """Blocks padded on the left, single steps that some rows sit out, then another block."""
    model = model_of(family)
    # For each block its width, and how many of its last columns are real in each row.
    blocks = [(6, [6, 3, 1]), (1, [1, 1, 1]), (1, [1, 0, 1]), (6, [2, 5, 3]), (1, [1, 1, 0]), (6, [6, 1, 4])]
    lengths = [sum(real[row] for _, real in blocks) for row in range(3)]
    tokens, positions, valid = packed(lengths, COLUMNS)
    expected = np.asarray(full(model, tokens, positions, valid))

    cache = init_cache(model.config, 3, COLUMNS, jnp.float32)
    column, done, mask = 0, [0, 0, 0], np.zeros((3, COLUMNS), bool)
    for width, real in blocks:
        step_tokens, step_positions = np.zeros((2, 3, width), np.int32)
        for row, count in enumerate(real):
            if count:
                span = slice(done[row], done[row] + count)
                step_tokens[row, -count:] = tokens[row, span]
                step_positions[row, -count:] = positions[row, span]
                mask[row, column + width - count : column + width] = True
        hidden, cache = extend(model, step_tokens, step_positions, cache, jnp.int32(column), jnp.array(mask))
        assert np.isfinite(hidden).all()
        for row, count in enumerate(real):
            got, want = hidden[row, width - count :], expected[row, done[row] : done[row] + count]
            np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
            done[row] += count
        column += width
    assert done == lengths


def test_the_last_columns_alone_are_those_of_all():
    """The last layer leaves out the other columns' outputs, and none of their keys and values."""
    model, (tokens, positions, valid) = model_of("qwen2"), packed([COLUMNS] * 2, COLUMNS)
    cache, zero = init_cache(model.config, 2, COLUMNS, jnp.float32), jnp.int32(0)
    hidden, whole = extend(model, tokens, positions, cache, zero, valid)
    tail, cut = extend_last(model, tokens, positions, cache, zero, valid)
    assert tail.shape[1] == 2
    np.testing.assert_allclose(tail, hidden[:, -2:], atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), cut, whole)


def test_scan_and_remat_change_neither_values_nor_gradients():
    model, batch = model_of("qwen3"), packed([24, 17, 5], COLUMNS)

    def loss(model, **how):
        return jnp.sum(jnp.sin(model(*batch, **how)) * batch[2][:, :, None])

    plain = nnx.jit(nnx.value_and_grad(lambda m: loss(m, scan_layers=False, remat=False)))(model)
    scanned = nnx.jit(nnx.value_and_grad(loss))(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3, rtol=1e-4), plain, scanned)


def test_padding_and_the_future_change_nothing():
    model = model_of("qwen2")
    tokens, positions, valid = map(np.array, packed([24, 9, 1], COLUMNS))
    before = np.asarray(full(model, tokens, positions, valid))
    padded = full(model, np.where(valid, tokens, 7), np.where(valid, positions, 3), valid)
    np.testing.assert_array_equal(before[valid], np.asarray(padded)[valid])
    assert np.isfinite(padded).all()
    tokens[0, 10] = (tokens[0, 10] + 1) % VOCAB
    changed = np.asarray(full(model, tokens, positions, valid))
    np.testing.assert_array_equal(before[0, :10], changed[0, :10])
    assert (np.abs(before[0, 10:] - changed[0, 10:]).max(axis=-1) > 1e-4).all()


def test_a_row_with_nothing_valid_is_finite():
    model = model_of("qwen3")
    cache = init_cache(model.config, 3, COLUMNS, jnp.float32)
    zeros = jnp.zeros((3, 6), jnp.int32)
    hidden, cache = extend(model, zeros, zeros, cache, jnp.int32(0), jnp.zeros((3, COLUMNS), bool))
    assert np.isfinite(hidden).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(cache))


def test_grouped_heads_equal_repeated_key_heads():
    """Query head i reads key head i // group: with each key head repeated, plain attention is the same."""
    grouped = model_of("qwen2")
    plain = random_model(tiny("qwen2", num_kv_heads=4))
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(grouped)))
    for layer in state["backbone"]["layers"].values():
        for name in ("key", "value"):
            for part, value in layer["attention"][name].items():
                heads = value.reshape(*value.shape[:-1], 2, 16)
                layer["attention"][name][part] = np.repeat(heads, 2, axis=-2).reshape(*value.shape[:-1], 64)
    target = nnx.state(plain)
    nnx.replace_by_pure_dict(target, state)
    nnx.update(plain, target)
    batch = packed([24, 9, 1], COLUMNS)
    np.testing.assert_allclose(full(grouped, *batch), full(plain, *batch), atol=1e-5, rtol=0)


def test_bfloat16_computes_in_bfloat16_and_scores_in_float32():
    model = random_model(tiny("qwen3"), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    hidden = full(model, *packed([24, 9, 1], COLUMNS))
    assert hidden.dtype == jnp.bfloat16
    assert model.logits(hidden).dtype == jnp.float32
    cache = init_cache(model.config, 3, COLUMNS, jnp.bfloat16)
    tokens, positions, valid = packed([24, 24, 24], COLUMNS)
    stepped, cache = extend(model, tokens, positions, cache, jnp.int32(0), valid)
    assert cache[0][0].dtype == jnp.bfloat16
    reference = full(model, tokens, positions, valid)
    np.testing.assert_allclose(stepped.astype(jnp.float32), reference.astype(jnp.float32), atol=0.06)


def test_decoding_traces_once():
    model, traces = model_of("qwen2"), []

    @nnx.jit
    def step(model, tokens, positions, cache, column, valid):
        traces.append(None)
        return model.extend(tokens, positions, cache, column, valid)

    cache = init_cache(model.config, 1, COLUMNS, jnp.float32)
    for column in range(4):
        valid = jnp.arange(COLUMNS)[None] <= column
        _, cache = step(
            model, jnp.ones((1, 1), jnp.int32), jnp.full((1, 1), column), cache, jnp.int32(column), valid
        )
    assert len(traces) == 1


def test_full_size_qwen_has_the_published_parameter_count():
    config = ModelConfig(
        family="qwen2",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4_864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1e6,
        tie_embeddings=True,
        qkv_bias=True,
    )
    model = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == 494_032_768
    graph, state = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    valid = jax.ShapeDtypeStruct((4, 128), jnp.bool_)
    hidden = jax.eval_shape(lambda s, *a: nnx.merge(graph, s)(*a), state, tokens, tokens, valid)
    assert (hidden.shape, hidden.dtype) == ((4, 128, 896), jnp.bfloat16)
    cache = jax.eval_shape(lambda: init_cache(config, 4, 512, jnp.bfloat16))
    hidden, extended = jax.eval_shape(
        lambda s, *a: nnx.merge(graph, s).extend(*a),
        state,
        tokens,
        tokens,
        cache,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((4, 512), jnp.bool_),
    )
    assert hidden.shape == (4, 128, 896)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), extended) == jax.tree.map(
        lambda x: (x.shape, x.dtype), cache
    )


def test_critic_starts_at_zero_on_a_copied_backbone():
    policy, batch = model_of("qwen3"), packed([24, 9, 1], COLUMNS)
    critic = Critic.from_policy(policy)
    evaluate = nnx.jit(lambda critic, *batch: critic(*batch))
    values = evaluate(critic, *batch)
    assert (values.shape, values.dtype) == ((3, COLUMNS), jnp.float32)
    np.testing.assert_array_equal(values, 0.0)

    head = np.linspace(-1, 1, 32, dtype=np.float32)
    critic.value.kernel.set_value(jnp.asarray(head[:, None]))
    critic.value.bias.set_value(jnp.asarray(np.float32([0.5])))
    expected = np.asarray(full(policy, *batch)) @ head + 0.5
    np.testing.assert_allclose(evaluate(critic, *batch), expected, atol=1e-4)

    kept = np.array(policy.backbone.embedding[...])
    for leaf in jax.tree.leaves(nnx.state(critic)):
        leaf.delete()  # what donating the critic does
    np.testing.assert_array_equal(policy.backbone.embedding[...], kept)


def test_fresh_parameters():
    """Distinct draws for each layer; the two maps onto the residual stream start smaller."""
    config = tiny("qwen2", num_layers=2)
    critic = Critic(config, rngs=nnx.Rngs(0))
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(critic)))
    first, layer = state["backbone"]["layers"].values()
    assert np.std(state["backbone"]["embedding"]) == pytest.approx(0.02, rel=0.1)
    assert np.std(layer["attention"]["query"]["kernel"]) == pytest.approx(0.02, rel=0.1)
    assert np.std(layer["attention"]["out"]["kernel"]) == pytest.approx(0.01, rel=0.1)
    assert np.std(layer["mlp"]["down"]["kernel"]) == pytest.approx(0.01, rel=0.1)
    assert not np.array_equal(first["mlp"]["up"]["kernel"], layer["mlp"]["up"]["kernel"])
    np.testing.assert_array_equal(layer["attention"]["key"]["bias"], 0.0)
    np.testing.assert_array_equal(layer["mlp_norm"]["weight"], 1.0)
    np.testing.assert_array_equal(state["value"]["kernel"], 0.0)


@pytest.mark.parametrize("family", TIED)
def test_config_survives_both_spellings(family):
    config = tiny(family, rope_theta=5e5, max_position=512, norm_eps=1e-5)
    hf = config.to_hf()
    assert ModelConfig.from_hf(json.loads(json.dumps(hf))) == config
    newer = {key: value for key, value in hf.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default", **(hf["rope_scaling"] or {})}
    assert ModelConfig.from_hf(newer) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is not supported; use one of llama, qwen2, qwen3"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"use_sliding_window": True}, "Sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "Sliding-window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "Partial rotary"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"quantization_config": {"bits": 4}}, "Quantized weights"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"head_dim": 7}, "must be even"),
    ],
)
def test_configs_that_the_blocks_cannot_do_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(tiny("qwen2").to_hf() | changes)


def test_switches_must_fit_the_family():
    with pytest.raises(ValueError, match="qwen3 model has qkv_bias=False and qk_norm=True"):
        tiny("qwen3", qk_norm=False)


@pytest.mark.parametrize("family", TIED)
def test_key_table_names_every_parameter_once(family):
    paths = [entry.path for entry in key_table(tiny(family)).values()]
    assert len(paths) == len(set(paths))
    assert set(paths) == {path for path, _ in nnx.to_flat_state(nnx.state(model_of(family)))}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 30_000])
@pytest.mark.parametrize("family", TIED)
def test_save_and_load_give_the_same_parameters(tmp_path, family, max_shard_bytes):
    model = model_of(family)
    save_pretrained(model, tmp_path, max_shard_bytes=max_shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if max_shard_bytes == 10**9 else 4)
    loaded = load_pretrained(tmp_path)
    assert loaded.config == model.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(loaded))
    batch = packed([24, 9, 1], COLUMNS)
    np.testing.assert_array_equal(full(model, *batch), full(loaded, *batch))


def test_bfloat16_folders(tmp_path):
    model = model_of("qwen3")
    save_pretrained(model, tmp_path, dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    narrow = load_pretrained(tmp_path, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    wide = load_pretrained(tmp_path)
    np.testing.assert_array_equal(narrow.head[...].astype(jnp.float32), wide.head[...])
    np.testing.assert_array_equal(model.head[...].astype(jnp.bfloat16), narrow.head[...])


def test_a_later_export_replaces_an_earlier_one(tmp_path):
    save_pretrained(model_of("qwen3"), tmp_path, max_shard_bytes=20_000)
    save_pretrained(model_of("qwen2"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert load_pretrained(tmp_path).config == tiny("qwen2")


def test_place_receives_every_parameter(tmp_path):
    save_pretrained(model_of("qwen2"), tmp_path)
    placed = {}

    def place(path, array):
        placed[path] = array.shape
        return jax.device_put(array, jax.devices()[0])

    model = load_pretrained(tmp_path, place=place)
    assert placed == {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model))}


def test_tokenizer_files_travel(tmp_path):
    source, out = tmp_path / "tokenizer", tmp_path / "out"
    source.mkdir()
    (source / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 60, "content": "<|im_end|>"}, {"id": 59, "content": "<pad>"}]})
    )
    (source / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": {"content": "<pad>"}})
    )
    save_pretrained(model_of("qwen2"), out, tokenizer_dir=source)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((out / "generation_config.json").read_text()) == {
        "eos_token_id": 60,
        "pad_token_id": 59,
    }
    (source / "generation_config.json").write_text('{"eos_token_id": 1}')
    save_pretrained(model_of("qwen2"), out, tokenizer_dir=source)
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 1}
    save_pretrained(model_of("qwen2"), out, tokenizer_dir=out)


def edit(folder, change, name="model.safetensors"):
    """Rewrites a weight file after `change` has seen its dictionary."""
    tensors = safetensors.numpy.load_file(folder / name)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / name)


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"missing {NORM}"),
        (lambda t: t.update({"extra.bias": t[NORM]}), "unknown extra.bias"),
        (lambda t: t.update({NORM: t[NORM][:5].copy()}), rf"mis-shaped {NORM} \(5,\) instead of \(32,\)"),
        (lambda t: t.update({HEAD: np.zeros((3, 32), np.float32)}), f"mis-shaped {HEAD}"),
        (lambda t: (t.pop(NORM), t.update({"b": np.ones(1)})), f"missing {NORM}; unknown b"),
    ],
)
def test_wrong_keys_are_listed(tmp_path, change, message):
    save_pretrained(model_of("qwen2"), tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ModelFolderError, match=message):
        load_pretrained(tmp_path)


def test_redundant_tied_head_and_stored_frequencies_are_accepted(tmp_path):
    save_pretrained(model_of("qwen2"), tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as reader:
        assert HEAD not in reader.keys()  # noqa: SIM118
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    edit(tmp_path, lambda t: t.update({HEAD: t["model.embed_tokens.weight"]} | extra))
    assert load_pretrained(tmp_path).head is None


def test_duplicate_keys_are_listed(tmp_path):
    save_pretrained(model_of("qwen2"), tmp_path, max_shard_bytes=30_000)
    last = "model-00004-of-00004.safetensors"
    edit(tmp_path, lambda t: t.update({NORM: np.ones(32, np.float32)}), name=last)
    with pytest.raises(ModelFolderError, match=rf"duplicate {NORM} \(again in {last}\)"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json"),
        ({"config.json": "{"}, "not valid JSON"),
        ({"config.json": "[]"}, "does not hold a JSON object"),
        ({"config.json": '{"model_type": "gpt2"}'}, "cannot be used: Model type 'gpt2' is not supported"),
        ({"config.json": None}, "neither model.safetensors nor"),
        ({"config.json": None, "model.safetensors": "no"}, "not a complete safetensors file"),
        ({"config.json": None, "model.safetensors.index.json": "{}"}, "has no weight_map"),
        (
            {
                "config.json": None,
                "model.safetensors.index.json": '{"weight_map": {"a": "gone.safetensors"}}',
            },
            "lacks weight files .* gone.safetensors",
        ),
        (
            {
                "config.json": None,
                "model.safetensors.index.json": '{"weight_map": {"a": "../up.safetensors"}}',
            },
            "lacks weight files",
        ),
    ],
)
def test_broken_folders_say_what_is_wrong(tmp_path, files, message):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "up.safetensors").touch()
    for name, text in files.items():
        (folder / name).write_text(json.dumps(tiny("qwen2").to_hf()) if text is None else text)
    with pytest.raises(ModelFolderError, match=message):
        load_pretrained(folder)


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(ModelFolderError, match="There is no model folder"):
        load_pretrained(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ModelFolderError, match="is a file"):
        load_pretrained(tmp_path / "file")
    with pytest.raises(ModelFolderError, match="nobody/nothing is neither a local folder nor a model"):
        load_pretrained("nobody/nothing")
