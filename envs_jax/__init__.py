"""Worlds in pure JAX: rules plus a text face. Never imports ragen_jax."""
