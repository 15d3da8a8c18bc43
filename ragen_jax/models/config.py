"""What a dense Qwen or Llama is, and how `config.json` says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


class Llama3Scaling(NamedTuple):
    """Stretched rotary wavelengths of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder-only model. Hashable, so it can be a static argument.

    `family` fixes where a model of these sizes departs from plain Llama: qwen2 (which includes Qwen1.5 and
    Qwen2.5) has biases on the query, key and value projections, qwen3 an RMSNorm on each query and key head.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position: int = 32_768
    init_stddev: float = 0.02  # of random weights; no part of a loaded model

    def __post_init__(self) -> None:
        if self.family not in _ARCHITECTURES:
            raise ValueError(f"Model type {self.family!r} is not supported; use one of {_families()}.")
        if self.qkv_bias != (self.family == "qwen2") or self.qk_norm != (self.family == "qwen3"):
            raise ValueError(
                f"A {self.family} model has qkv_bias={self.family == 'qwen2'} and "
                f"qk_norm={self.family == 'qwen3'}, not qkv_bias={self.qkv_bias} and qk_norm={self.qk_norm}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}.")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed `config.json`, of transformers 4 or 5, and refuses what the blocks cannot do."""
        family = hf.get("model_type")
        if family not in _ARCHITECTURES:
            raise ValueError(f"Model type {family!r} is not supported; use one of {_families()}.")
        absent = [key for key in _REQUIRED if hf.get(key) is None]
        if absent:
            raise ValueError(f"The model's config lacks {', '.join(absent)}.")
        _refuse_unsupported(hf)

        heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
        # transformers' Qwen3 has heads of 128 when the file is silent, whatever the hidden size.
        head_dim = hf.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
        rope = _rope(hf)
        return cls(
            family=family,
            vocab_size=hf["vocab_size"],
            hidden_size=hidden,
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rope_theta=float(rope.get("rope_theta") or 10_000.0),
            rope_scaling=_scaling(rope),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            max_position=hf.get("max_position_embeddings") or (2_048 if family == "llama" else 32_768),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model. RoPE in the older spelling, which transformers 4 and 5 read."""
        hf: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
        }
        if self.family == "qwen2":
            hf["use_sliding_window"] = False
        else:
            hf["attention_bias"] = False
        if self.family == "llama":
            hf["mlp_bias"] = False
        if self.rope_scaling is not None:
            hf["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_position,
            }
        return hf


def _families() -> str:
    return ", ".join(sorted(_ARCHITECTURES))


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    if hf.get("quantization_config"):
        raise ValueError("Quantized weights are not supported; use the model's bfloat16 or float32 version.")
    if hf.get("use_sliding_window") or "sliding_attention" in (hf.get("layer_types") or ()):
        raise ValueError("Sliding-window attention is not supported; use a model with full attention.")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"Activation {hf['hidden_act']!r} is not supported; use a model with 'silu'.")
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise ValueError(f"{key}=true is not supported; use a {hf['model_type']} model without it.")


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in one dictionary: `rope_parameters` (v5) over `rope_scaling` and `rope_theta` (v4)."""
    return {
        "rope_theta": hf.get("rope_theta"),
        **(hf.get("rope_scaling") or {}),
        **(hf.get("rope_parameters") or {}),
    }


def _scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("Partial rotary embeddings (partial_rotary_factor) are not supported.")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(
            f"RoPE scaling {kind!r} is not supported; use a model with 'llama3' scaling or none."
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    absent = [key for key in keys if rope.get(key) is None]
    if absent:
        raise ValueError(f"The model's llama3 RoPE scaling lacks {', '.join(absent)}.")
    return Llama3Scaling(*(rope[key] for key in keys))
