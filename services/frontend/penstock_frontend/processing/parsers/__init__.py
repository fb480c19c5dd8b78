"""Parsers of tool calls and of reasoning, one per model format."""
