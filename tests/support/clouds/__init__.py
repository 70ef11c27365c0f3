"""Stand-ins of clouds, for tests."""
