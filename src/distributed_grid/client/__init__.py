"""The client side of the control plane's socket: connecting, starting a daemon, uploads and downloads."""
