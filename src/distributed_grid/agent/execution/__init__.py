"""Execution of attempts: host, spawner, shims, affinity and throttling, recovery after a restart."""
