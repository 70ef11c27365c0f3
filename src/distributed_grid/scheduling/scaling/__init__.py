"""Scaling: how many workers of which kind the waiting requests call for, and which workers are not needed any more."""
