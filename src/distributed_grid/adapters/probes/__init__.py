"""Hardware and kernel probes: capacity and use of a machine.

`machine_probe.py` measures CPU and memory (from `procfs.py`), `gpu_probe.py` the GPUs and their users; `procfs.py`
finds the nodes of Ray, too. Belongs here: reading hardware and kernel counters. Does not belong here: decisions about
lending.
"""
