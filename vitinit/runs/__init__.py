"""Runs: the files that a run leaves, and how they are resumed from, compared and loaded."""
