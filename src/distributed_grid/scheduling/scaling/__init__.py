"""Scaling: what workers may cost, which are wanted, and which are given back."""
