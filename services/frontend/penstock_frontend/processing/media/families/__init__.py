"""Media of each model type. Processes media items, and replaces their placeholders in prompts."""
