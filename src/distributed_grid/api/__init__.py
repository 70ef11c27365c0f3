"""Request types, framing and errors of the control plane's socket; shared by client and server."""
