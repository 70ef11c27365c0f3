"""Where rows are kept: `sqlite.py` durably, `memory.py` for tests and simulation.

Belongs here: how bytes reach a disk and come back. Does not belong here: what the bytes mean.
"""
