"""Reaching nodes by SSH: connections, host keys, what is installed there, and the links their agents speak through.

Everything here runs in a child process of the control plane (`python -m distributed_grid.adapters.ssh`): the crypto
must not delay the loop that owns the ledger. Deciding who is to be reached belongs to the server.
"""
