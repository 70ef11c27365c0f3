"""The control plane as a process: composes Grid, agent and store, and serves the Unix socket.

Nothing is decided here; what can be asked for is in `requests`, how it is answered in `api`.
"""
