"""Preemption: who may be displaced for an urgent request, and who is."""
