"""Vision and audio encoders of an engine, and the scheduling of media (images, audio and video)."""
