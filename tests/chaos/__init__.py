"""Services killed, stopped and restarted under load: the requests, who sends them, and what came of them."""
