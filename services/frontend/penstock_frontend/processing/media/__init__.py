"""Media of requests (images, audio and video), which are read, checked, and processed for the model."""
