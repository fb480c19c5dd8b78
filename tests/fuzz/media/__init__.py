"""Media that nobody should send, their hosts, and decoders that are killed."""
