"""Engines: what can reserve a lease besides the grid itself. `local` reserves in memory, `ray` in a Ray cluster.

Only here is `ray` imported, and only in a child process of the control plane or inside the Ray cluster.
"""
