"""Media of each model type: processing of media items, and replacement of their placeholders in prompts."""
