"""Parsers of tool calls and of reasoning, by the format that a model writes."""
