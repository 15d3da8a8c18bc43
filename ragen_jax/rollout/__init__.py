"""Sampling and the KV-cached multi-turn engine."""
