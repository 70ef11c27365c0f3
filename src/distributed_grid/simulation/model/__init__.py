"""The simulated world: machines, network, agents, control plane, users, on a virtual clock."""
