"""Nodes under pressure: the scan of all nodes, loans between them, jobs that leave, and the plan of a round."""
