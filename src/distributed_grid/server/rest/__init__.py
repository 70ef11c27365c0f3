"""REST: the TCP listener, and the Starlette application that it loads on the first connection."""
