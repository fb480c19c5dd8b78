"""Conversations: chat templates, roles and tools, and the division of the model's answers into content blocks."""
