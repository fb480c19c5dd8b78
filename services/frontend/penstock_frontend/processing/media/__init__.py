"""Images, sound and video of requests: read, checked and processed for the model."""
