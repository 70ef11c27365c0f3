"""The user side of the memory pool."""
