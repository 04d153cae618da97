"""Recipes: a recipe is the complete description of one experiment, as a TOML file.

It is read once, checked, and then frozen. In reading order: sections.py (all keys), files.py
(reading and writing), values.py (types and bounds), resolve.py (the command line, options of model
and init), upgrade.py (recipes that runs of earlier versions wrote).
"""
