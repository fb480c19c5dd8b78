"""Media of requests (images, audio and video). Reads media, checks them, and processes them for the model."""
