"""Offers: lendable capacity of a node, from its measurements."""
