"""Anthropic's messages API over HTTP."""
