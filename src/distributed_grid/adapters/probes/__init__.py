"""What a machine has and how busy it is: `machine.py` through psutil and /proc, `cgroups.py` its fences.

Belongs here: reading hardware and kernel counters. Does not belong here: what to lend of it.
"""
