"""Adapters: one folder per port, one file per technology.

Belongs here: code that talks to a database, a kernel, a network or a cloud. Does not belong here: decisions; an adapter
does as ordered, and raises when it could not.
"""
