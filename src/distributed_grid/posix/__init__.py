"""Kernel idioms: short socket paths, peer credentials, the boot clock, locks, private files. Standard library only."""
