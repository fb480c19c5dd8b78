"""The process: how the frontend is assembled, listens, drains and stops."""
