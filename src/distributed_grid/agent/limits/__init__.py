"""What a running command may use: control groups where this user may make them, watching where not.

Standard library only; this runs in the spawner and its shims.
"""
