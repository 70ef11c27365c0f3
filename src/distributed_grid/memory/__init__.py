"""Data plane of the memory pool: blocks of bytes in the memory of other machines.

This package moves the bytes: the memory server (`server`), the agent's supervisor of it (`supervisor`), the blocking
client (`client`), and their messages (`protocol`). The place of each copy, its users and the time of their rights are
decided elsewhere; a ticket carries that decision here, and a server believes nothing else.

A *block* has one or more *copies*; a copy is held by one memory server. An *incarnation* of a server's memory lasts as
long as server or supervisor holds it, through crashes of either. A block's *generation* grows whenever the set of its
copies changes. A *chunk* is the unit of checksums and of writes: a write changes it whole or not at all.

Nodes have no NumPy and no `cryptography`: nothing here but `client.arrays` may need them.
"""
