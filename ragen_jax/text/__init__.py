"""Tokenizer tables (host, once), rendering and parsing on the device."""
