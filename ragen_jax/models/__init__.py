"""Qwen and Llama in Flax NNX, read from and written to Hugging Face folders."""
