"""RAGEN (StarPO, StarPO-S) in JAX: whole episodes of language-model agents in one compiled program."""

__version__ = "0.1.0"
