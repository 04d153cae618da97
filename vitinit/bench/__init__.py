"""Measurements: python -m vitinit.bench."""
