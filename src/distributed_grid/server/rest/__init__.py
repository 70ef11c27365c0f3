"""REST: the TCP listener, and the FastAPI application that it loads on the first connection."""
