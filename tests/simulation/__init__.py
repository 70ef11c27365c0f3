"""Fault campaign: the shipped code on a virtual clock, with simulated machines, networks and users.

Seeded faults break the simulated grid, and every invariant is checked after every step (`world`, `campaign`). Nothing
is decided here: batch settler, agent sessions, order executor, owner guard, reactor and scheduler are those of the
daemon and the agent. Nothing here reads a clock, and every random choice comes from one seed.
"""
