"""The files of attempts on a node: job directories, journals, checkpoints, output."""
