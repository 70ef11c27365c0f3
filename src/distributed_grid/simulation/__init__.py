"""The grid without machines: the real reactor on a virtual clock.

Two uses. *Chaos*: simulated machines, networks and users, broken by seeded faults, with every law held against every
step (`world`, `campaign`). *Replay*: what a policy would have done with work that was logged (`traces`, `replay`).
Deciding is not here: everything that decides is the reactor's and the scheduler's own code. Nothing here reads a
clock, and every random choice comes from one seed.
"""
