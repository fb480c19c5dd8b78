"""OpenAI's Responses API: items, stored responses, and streaming events."""
