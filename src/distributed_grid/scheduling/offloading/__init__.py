"""Offloading: which work should leave its node, by which way, where to, and whether that pays."""
