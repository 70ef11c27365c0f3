"""A Ray cluster: the driver process, the engine in the control plane, the actors inside the cluster.

Only here is `ray` imported, and only in a child process of the control plane or inside the Ray cluster.
"""
