"""Protocols of memory servers: data frames, authentication, control messages."""
