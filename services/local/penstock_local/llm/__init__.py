"""In-process engine for Python programs: ``LLM``."""
