"""What makes a plain Ray program use a boost. On the path of a job's own Python, so standard library and Ray only."""
