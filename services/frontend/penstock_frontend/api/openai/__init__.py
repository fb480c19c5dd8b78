"""OpenAI's APIs over HTTP: chat completions, completions and models, with the helpers that they share."""
