"""Checks and measurements of vitinit on a machine: vitinit bench."""
