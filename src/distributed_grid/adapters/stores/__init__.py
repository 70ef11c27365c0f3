"""Row stores: `sqlite.py` is durable, `in_memory.py` is for tests and simulation.

Belongs here: how bytes reach a disk and come back. Does not belong here: what the bytes mean.
"""
