"""Hypothesis without dice."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=60)
settings.load_profile("ci")
