"""Logic of a data-parallel rank: the state machine, the driver that carries out its effects, and the connections to
other ranks.
"""
