"""The agent's supervisor of its memory server."""
