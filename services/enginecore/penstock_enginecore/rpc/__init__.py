"""gRPC code of the engine: sessions of frontends, conversion of messages, the coordinator client, and sessions with
other nodes.
"""
