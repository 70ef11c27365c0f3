"""Lend the idle parts of unequal machines as time-bounded leases, the owner of each machine first."""

__version__ = "0.2.0"
