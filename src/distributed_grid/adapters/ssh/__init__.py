"""Nodes reached by SSH: connections and host keys, the child process that holds them, its handle in the control plane.

Nothing here decides which node is reached.
"""
