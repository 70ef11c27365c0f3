"""Row stores: `sqlite.py` is durable, `in_memory.py` is for tests and simulation.

Belongs here: writing bytes to a disk and reading them. Does not belong here: their meaning.
"""
