"""Deciders of offloading: moves of jobs and processes, consents, and automatic offloading."""
