"""Model parallelism: division of a model among several devices, and the connections between the workers that run the
shards.
"""
