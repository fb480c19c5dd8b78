"""Transcription and translation of speech: audio is cut into windows, which engines transcribe."""
