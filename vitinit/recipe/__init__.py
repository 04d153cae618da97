"""Recipes: a recipe is the complete description of one experiment, as a TOML file.

It is read once, checked, and then frozen. In reading order: sections.py (all keys), files.py
(reading, the command line, options of model and init).
"""
