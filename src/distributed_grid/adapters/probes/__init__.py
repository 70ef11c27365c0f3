"""What a machine has and how busy it is.

`machine.py` is the front door for CPU and memory (`kernel.py` reads /proc, `cgroups.py` the fences, `cpu_time.py`
keeps the windows), `nvml.py` the one for GPUs (`gpus.py` tells whose use it is); `inventory.py` is for people.

Belongs here: reading hardware and kernel counters. Does not belong here: what to lend of it.
"""
