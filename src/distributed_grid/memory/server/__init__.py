"""The memory server: a process of its own that holds copies and serves them to clients."""
