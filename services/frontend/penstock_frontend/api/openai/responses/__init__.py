"""OpenAI's responses API: items, stored responses, and the events of its streams."""
