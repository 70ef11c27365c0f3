"""Simulation: the code that ships, on a virtual clock and without machines.

Two uses. The *fault campaign*: simulated machines, networks and users, broken by seeded faults, with every invariant
checked after every step (`world`, `campaign`). The *replay*: what a policy would have done with work that was logged
(`replay`). Nothing is decided here: the batch settler, agent sessions, order executor, owner guard, reactor and
scheduler are those of the daemon and the agent. Nothing here reads a clock, and every random choice comes from one
seed.
"""
