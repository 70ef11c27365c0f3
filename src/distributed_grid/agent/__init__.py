"""Node agent: runs attempts on one machine, enforces their limits, yields to its owner, reports to the control plane.

What belongs here touches this one machine; deciding who gets what does not. The spawner and shim processes use
`execution/{spawner,shim,launch}.py`, `files/job_dir.py` and `limits/`, which import only the standard library.
"""
