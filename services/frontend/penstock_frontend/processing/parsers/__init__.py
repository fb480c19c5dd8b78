"""Parsers of tool calls and of reasoning in the text of model outputs. There is one parser for each model format."""
