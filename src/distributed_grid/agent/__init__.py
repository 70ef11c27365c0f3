"""Node agent: runs attempts on one machine, enforces their limits, yields to its owner, reports to the control plane.

Belongs here: code that touches this one machine. Does not belong here: decisions about leases. The spawner and shim
processes use `execution/{spawner,shim,launch}.py`, `files/job_dir.py` and `limits/`, which import only the standard
library.
"""
