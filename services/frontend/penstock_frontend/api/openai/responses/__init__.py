"""OpenAI's Responses API: its items, stored responses, and streaming events."""
