"""Replaying a trace under a policy, and the statistics of it."""
