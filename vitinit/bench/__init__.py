"""Checks and measurements of vitinit on a machine: python -m vitinit.bench."""
