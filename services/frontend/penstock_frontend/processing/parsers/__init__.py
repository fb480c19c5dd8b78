"""Parsers of tool calls and of reasoning, with one parser per model format."""
