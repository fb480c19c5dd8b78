"""Process of the frontend: it creates the components, runs the servers, drains, and shuts down."""
