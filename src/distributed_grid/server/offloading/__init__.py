"""Moves of processes in the control plane: shipping their files, and bringing and returning results."""
