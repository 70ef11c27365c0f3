"""Fuzz campaign: mutated frames against a real daemon, a real agent and a real memory server."""
