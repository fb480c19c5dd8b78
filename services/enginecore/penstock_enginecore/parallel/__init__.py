"""Model parallelism: division of a model into shards for several devices, and the connections between the workers, each
of which runs one shard.
"""
