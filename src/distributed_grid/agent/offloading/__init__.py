"""Offloading on a node: what runs here besides jobs, and the safe end of a process that moves away.

`guard_core.py` decides what becomes of an original, without input or output; `guard_process.py` is the process that
carries that out, one for each move, independent of the agent. Guards import only the standard library.
"""
