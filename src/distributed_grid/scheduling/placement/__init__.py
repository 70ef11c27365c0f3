"""Placement: filters, scores, the chosen node, and why."""
