"""Process of the frontend: creation of its components, servers, drain and shutdown."""
