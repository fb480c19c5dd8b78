"""Conversations: chat templates, roles, tools, and the content blocks of the model's answers."""
