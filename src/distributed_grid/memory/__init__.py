"""Data plane of the memory pool: blocks of bytes in the memory of other machines.

Here is what touches bytes: the memory server (`server`), the agent's supervisor of it (`supervisor`), the blocking
client (`client`), and what they send each other (`protocol`). Which copy is where, who may use it and for how long is
decided elsewhere; a ticket carries that decision here, and a server believes nothing else.

A *block* has one or more *copies*; a copy is held by one memory server. An *incarnation* of a server's memory lasts as
long as server or supervisor holds it, through crashes of either. A block's *generation* grows whenever the set of its
copies changes. A *chunk* is what a checksum covers and what a write changes whole or not at all.

Nodes have no NumPy and no `cryptography`: nothing here but `client.arrays` may need them.
"""
