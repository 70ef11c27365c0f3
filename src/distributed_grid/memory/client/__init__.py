"""The client of memory servers: reading and writing blocks."""
