"""Chat templates, roles, tools, and the content blocks of answers."""
