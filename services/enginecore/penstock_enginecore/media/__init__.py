"""Vision and audio encoders of an engine, and what the scheduler knows of media."""
