"""The control plane as a process: composes grid, agent, store and services, and serves the Unix socket and REST.

Nothing is decided here. What can be requested is in `api/requests.py`, what answers it in `services`.
"""
