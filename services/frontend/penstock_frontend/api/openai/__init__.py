"""OpenAI's APIs over HTTP: chat completions, completions, models, and shared helpers."""
