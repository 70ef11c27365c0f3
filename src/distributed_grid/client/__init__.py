"""Clients of the control plane's socket, blocking and asyncio; starting a daemon; what travels with a job."""
