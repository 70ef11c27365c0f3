"""Limits of a running command: process trees, cores, cgroups, memory, timers. Standard library only."""
