"""Media of each model family: processing of items, and their place in prompts."""
