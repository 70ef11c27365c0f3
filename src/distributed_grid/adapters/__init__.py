"""The grid's hands and eyes: a folder is a port, a file is one technology behind it.

Belongs here: code that talks to a database, a kernel, a network or a cloud. Does not belong here:
deciding anything; an adapter does as it is told and says plainly when it could not.
"""
