"""Value kinds of a cluster file: scalars, numbers, text, containers."""
