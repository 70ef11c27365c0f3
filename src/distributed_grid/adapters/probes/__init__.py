"""Hardware and kernel probes: what a machine has and how busy it is.

`machine_probe.py` measures CPU and memory (from `procfs.py` and `cgroup_limits.py`), `nvml.py` the GPUs (`gpus.py`
divides their use between the grid and others).

Belongs here: reading hardware and kernel counters. Does not belong here: what to lend of it.
"""
