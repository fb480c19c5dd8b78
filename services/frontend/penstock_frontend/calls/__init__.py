"""One file for each kind of call, whatever its protocol: generation, chat, pooling, scoring, adapters, admission, readiness."""
