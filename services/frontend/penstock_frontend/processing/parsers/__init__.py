"""Parsers of tool calls and of reasoning. Each model format has its own parser."""
