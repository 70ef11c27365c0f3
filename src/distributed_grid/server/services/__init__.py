"""Services that answer requests, one per noun; used by the socket (`rpc`) and by REST (`rest`)."""
