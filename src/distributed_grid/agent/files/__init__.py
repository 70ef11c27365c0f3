"""Files of attempts on a node: job directories, output, working directories, signals between agent and job."""
