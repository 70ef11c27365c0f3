"""The control plane as a process: composes grid, agent, store and services, and serves the Unix socket and REST.

Nothing is decided here. The requests are in `api/requests.py`, their endpoints in `services`.
"""
