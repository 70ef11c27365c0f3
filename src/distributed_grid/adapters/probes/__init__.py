"""Hardware and kernel probes: what a machine has and how busy it is.

`machine_probe.py` measures CPU and memory (from `procfs.py` and `cgroup_limits.py`), `gpu_probe.py` the
GPUs and who uses them; `procfs.py` finds the nodes of Ray, too.

Belongs here: reading hardware and kernel counters. Does not belong here: what to lend of it.
"""
