"""A medium as a client gives it, for whoever processes it. Calls have it, too, so it stands beside them."""

from penstock_frontend.media_parts import EncodedFile, Features, Frame, Frames, MediaPart, Source, Url

__all__ = ["EncodedFile", "Features", "Frame", "Frames", "MediaPart", "Source", "Url"]
