"""The Unix socket: connections and the dispatch of requests to services."""
