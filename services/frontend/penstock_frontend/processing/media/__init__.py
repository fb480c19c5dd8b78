"""Media of requests (images, audio and video): code that fetches, checks and processes them for the model."""
