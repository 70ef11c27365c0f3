"""Preemption: candidates, cost bounds per node, exact victims."""
