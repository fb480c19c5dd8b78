"""Routes of the OpenAI API for speech."""
