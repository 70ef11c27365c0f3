"""The data plane of the memory pool: bytes in the memory of other machines, as fast as the wire carries them.

Here is what touches bytes: the memory server (`server`), the agent's keeper of it (`keeper`), and the blocking client
(`blocks`). Which copy lives where, who may use it and for how long is decided elsewhere; a ticket (`claims`) carries
that decision here, and a server believes nothing else.

A *block* has one or more *copies*; a copy lives in one memory server. An *incarnation* is one life of a server's
memory: it lasts as long as server or keeper holds it, through crashes of either. A *generation* of a block grows
whenever the set of places of its copies changes. A *chunk* is what a checksum covers and what a write changes whole
or not at all.

Nodes have no NumPy and no `cryptography`: nothing here but `arrays` may need them.
"""
