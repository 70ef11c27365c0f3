"""Running attempts: spawner, shims, throttling, recovery after a restart."""
