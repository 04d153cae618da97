"""Checks of a device, on small inputs: python -m vitinit.bench all, and tests/gpu.

Each is a function of `Conditions` that gives figures, or raises AssertionError. Its docstring says
what is compared with what, how near it has to be, and why.
"""
