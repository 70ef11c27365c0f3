"""What runs on a node: starting, limiting, stopping and finding commands, and speaking for the machine.

`attempts.py` is the door: everything else that runs a command is reached through its `AttemptHost`.
`spawner.py`, `shim.py`, `jobdir.py`, `tree.py` and `limits/` live in the small processes next to the jobs, so
they import nothing but the standard library. What belongs here touches this one machine; deciding who gets
what does not.
"""
