"""Advantages, losses, filters, rewards, diagnostics: arrays in, arrays out."""
