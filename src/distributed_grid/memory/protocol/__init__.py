"""The protocols of memory servers: frames, tickets, TLS, control messages."""
