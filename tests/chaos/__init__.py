"""Services killed, stopped and restarted under load: the requests, their clients, and checks of the outcomes."""
