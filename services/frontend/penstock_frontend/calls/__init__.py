"""Calls, one file per kind, independent of the protocol: generation, chat, pooling, scoring, adapters, and admission."""
