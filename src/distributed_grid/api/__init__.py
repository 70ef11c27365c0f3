"""The request types of the control plane's socket and how they are framed; shared by client and server."""
