"""Hugging Face folders to models and back, through one key table."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from ragen_jax.errors import UserError
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.transformer import CausalLM

KeyPath = tuple[str | int, ...]
Place = Callable[[KeyPath, np.ndarray], jax.Array]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class ModelFolderError(UserError):
    """A model folder that cannot be read; the message says what to change."""


class Entry(NamedTuple):
    """Where a checkpoint's tensor lives in `CausalLM`, and whether torch stores its transpose."""

    path: KeyPath
    transpose: bool


def key_table(config: ModelConfig) -> dict[str, Entry]:
    """Every checkpoint key of a model, exactly once. Import and export both read this table."""
    table = {
        "model.embed_tokens.weight": Entry(("backbone", "embedding"), False),
        "model.norm.weight": Entry(("backbone", "norm", "weight"), False),
    }
    if not config.tie_embeddings:
        table["lm_head.weight"] = Entry(("head",), False)
    projections = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    for index in range(config.num_layers):
        hf, here = f"model.layers.{index}", ("backbone", "layers", index)
        table[f"{hf}.input_layernorm.weight"] = Entry((*here, "attention_norm", "weight"), False)
        table[f"{hf}.post_attention_layernorm.weight"] = Entry((*here, "mlp_norm", "weight"), False)
        for theirs, ours in projections.items():
            table[f"{hf}.self_attn.{theirs}.weight"] = Entry((*here, "attention", ours, "kernel"), True)
            if config.qkv_bias and theirs != "o_proj":
                table[f"{hf}.self_attn.{theirs}.bias"] = Entry((*here, "attention", ours, "bias"), False)
        if config.qk_norm:
            for theirs, ours in {"q_norm": "query_norm", "k_norm": "key_norm"}.items():
                table[f"{hf}.self_attn.{theirs}.weight"] = Entry((*here, "attention", ours, "weight"), False)
        for name in ("gate", "up", "down"):
            table[f"{hf}.mlp.{name}_proj.weight"] = Entry((*here, "mlp", name, "kernel"), True)
    return table


def resolve_folder(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """A local folder as it is; a hub id as the folder of its downloaded safetensors and JSON files."""
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    name = os.fspath(path_or_hub_id)
    if folder.exists():
        raise ModelFolderError(f"{name} is a file; give the model's folder instead.")
    if not _HUB_ID.fullmatch(name):
        raise ModelFolderError(f"There is no model folder {name}; check the path.")
    try:
        # Only what is data: no Python files, no pickles, nothing from subfolders.
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["*.safetensors", "*.json"], ignore_patterns=["*/*"]
            )
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelFolderError(
            f"{name} is neither a local folder nor a model that could be downloaded; "
            f"check the name, the network and your access ({reason})"
        ) from error


def load_config(folder: Path) -> ModelConfig:
    """The `config.json` of a local folder."""
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder} has no config.json; give a folder in Hugging Face format.")
    try:
        return ModelConfig.from_hf(_read_json(folder / "config.json"))
    except ModelFolderError:
        raise
    except (ValueError, TypeError) as error:
        raise ModelFolderError(f"{folder / 'config.json'} cannot be used: {error}") from error


def load_pretrained(
    path_or_hub_id: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
    place: Place | None = None,
) -> CausalLM:
    """Reads a model in safetensors, one file or sharded, one tensor at a time.

    `dtype` is what the model computes in, `param_dtype` what it stores. `place(path, array)` puts a
    parameter, already in `param_dtype` and in this package's orientation, where it belongs (by default on
    the default device), so that a sharded model never exists whole on one device.
    """
    folder = resolve_folder(path_or_hub_id)
    config = load_config(folder)
    table = key_table(config)
    # Shapes only: drawing random weights to overwrite them would double the memory.
    graph, state = nnx.split(
        nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype))
    )
    variables = dict(nnx.to_flat_state(state))
    shapes = {
        key: variables[entry.path].shape[::-1] if entry.transpose else variables[entry.path].shape
        for key, entry in table.items()
    }
    if config.tie_embeddings:  # some exports repeat the tied matrix
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]

    with contextlib.ExitStack() as stack:
        readers = [(name, _open(folder / name, stack)) for name in _weight_files(folder)]
        _check_keys(folder, readers, shapes, optional={"lm_head.weight"} - table.keys())
        for _, reader in readers:
            for key in table.keys() & set(reader.keys()):
                path, transpose = table[key]
                tensor = reader.get_tensor(key)
                array = (tensor.T if transpose else tensor).astype(jnp.dtype(param_dtype), order="C")
                variables[path].set_value(jnp.array(array) if place is None else place(path, array))
    return nnx.merge(graph, state)


def save_pretrained(
    model: CausalLM,
    out_dir: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Writes a folder that `transformers` and `load_pretrained` read; weights in `dtype` (or as stored).

    Files of an earlier export in `out_dir` are replaced. A tied head is never written.
    """
    out = Path(out_dir)
    source = None if tokenizer_dir is None else resolve_folder(tokenizer_dir)
    out.mkdir(parents=True, exist_ok=True)
    # Left-over weights would be read instead of the new ones, or beside them.
    for path in (out / SINGLE, out / INDEX, *out.glob("model-?????-of-?????.safetensors")):
        path.unlink(missing_ok=True)

    dtype = jnp.dtype(model.backbone.param_dtype if dtype is None else dtype)
    table = key_table(model.config)
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    sizes = {key: variables[entry.path].size * dtype.itemsize for key, entry in table.items()}
    shards = _plan_shards(sizes, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, keys in zip(names, shards, strict=True):
        tensors = {
            key: _to_host(variables[table[key].path][...], table[key].transpose, dtype) for key in keys
        }
        safetensors.numpy.save_file(tensors, out / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        _write_json(out / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})

    generation = {} if source is None else _copy_tokenizer(source, out)
    # Named even when unknown, because transformers' Llama would otherwise end at token 2.
    ends = {key: generation.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # `torch_dtype` is the spelling that every version of transformers reads.
    _write_json(out / "config.json", {**model.config.to_hf(), **ends, "torch_dtype": dtype.name})
    return out


def _to_host(array: jax.Array, transpose: bool, dtype: np.dtype) -> np.ndarray:
    host = np.asarray(array)
    # safetensors writes the buffer as it lies, so a transposed view must be made contiguous.
    return np.ascontiguousarray((host.T if transpose else host).astype(dtype))


def _plan_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Keys in order, cut where the next one would pass `limit` bytes; a larger tensor stands alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    return shards


def _copy_tokenizer(source: Path, out: Path) -> dict[str, Any]:
    """Copies tokenizer files and `generation_config.json`, or derives the latter; returns its content."""
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).is_file() and source.resolve() != out.resolve():
            shutil.copyfile(source / name, out / name)
    if (source / "generation_config.json").is_file():
        return _read_json(source / "generation_config.json")
    settings, tokenizer = (
        _read_json(source / name) if (source / name).is_file() else {}
        for name in ("tokenizer_config.json", "tokenizer.json")
    )
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    generation = {}
    for kind in ("bos_token", "eos_token", "pad_token"):
        token = settings.get(kind)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            generation[f"{kind}_id"] = ids[token]
    _write_json(out / "generation_config.json", generation)
    return generation


def _weight_files(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise ModelFolderError(
            f"{folder} has neither {SINGLE} nor {INDEX}; convert its weights to safetensors."
        )
    index = _read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{folder / INDEX} has no weight_map; download the file again.")
    names = sorted(set(map(str, weight_map.values())))
    absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if absent:
        raise ModelFolderError(f"{folder} lacks weight files that {INDEX} names: {_some(absent)}.")
    return names


def _open(path: Path, stack: contextlib.ExitStack) -> Any:
    try:
        return stack.enter_context(safetensors.safe_open(path, framework="numpy"))
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelFolderError(f"{path} is not a complete safetensors file; download it again.") from error


def _check_keys(
    folder: Path,
    readers: list[tuple[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    optional: set[str],
) -> None:
    """Raises one error that lists every unknown, missing, duplicate or mis-shaped key, before any is read."""
    seen: dict[str, tuple[int, ...]] = {}
    duplicate = []
    for name, reader in readers:
        for key in reader.keys():  # noqa: SIM118 (not a mapping)
            if key in seen:
                duplicate.append(f"{key} (again in {name})")
            seen[key] = tuple(reader.get_slice(key).get_shape())
    # Checkpoints of early Llamas store the rotary frequencies, which the config determines.
    unknown = [key for key in seen if key not in shapes and not key.endswith("rotary_emb.inv_freq")]
    problems = {
        "missing": [key for key in shapes if key not in seen and key not in optional],
        "unknown": unknown,
        "duplicate": duplicate,
        "mis-shaped": [
            f"{key} {seen[key]} instead of {shape}"
            for key, shape in shapes.items()
            if key in seen and seen[key] != shape
        ],
    }
    found = [f"{kind} {_some(keys)}" for kind, keys in problems.items() if keys]
    if found:
        raise ModelFolderError(
            f"The weights in {folder} do not match config.json; use one model's files: {'; '.join(found)}."
        )


def _some(items: Iterable[str], most: int = 20) -> str:
    items = sorted(items)
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(parsed, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object.")
    return parsed


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
