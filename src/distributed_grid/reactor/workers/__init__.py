"""Deciders of workers: rented machines from the intent to the proof that they are gone, scaling, pull workers."""
