"""Media of each model type. A family of model types has code that processes media items, and replaces their
placeholders in prompts.
"""
