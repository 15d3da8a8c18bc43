"""Qwen and Llama in Flax NNX, read from and written to Hugging Face folders."""

from ragen_jax.models.config import Llama3Scaling, ModelConfig
from ragen_jax.models.transformer import Backbone, Cache, CausalLM, Critic, init_cache

__all__ = ["Backbone", "Cache", "CausalLM", "Critic", "Llama3Scaling", "ModelConfig", "init_cache"]
