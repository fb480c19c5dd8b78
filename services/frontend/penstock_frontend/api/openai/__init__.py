"""OpenAI's APIs over HTTP: chat completions, completions, models, and what they share."""
