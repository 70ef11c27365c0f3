"""Fault campaign of rented machines: `python -m tests.clouds` (docs/internals/cloud-campaign.md)."""
