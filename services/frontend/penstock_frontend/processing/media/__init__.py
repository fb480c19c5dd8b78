"""Media of requests (images, audio and video): reading, checks, and processing for the model."""
