"""Checks that a device computes correctly, on small inputs.

`python -m vitinit.bench all` and tests/gpu run them. Each check is a function of `Conditions` that
returns rows of numbers or raises AssertionError. Its docstring says what is compared with what, how
close the two have to be, and why. The reference is mostly the CPU. On a machine without a GPU both
sides run on the CPU, where the comparison is between two code paths or trivially exact.
"""
