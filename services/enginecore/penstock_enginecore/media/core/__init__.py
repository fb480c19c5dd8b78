"""Media caches of the engine core, and scheduling of media encoding."""
