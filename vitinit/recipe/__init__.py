"""A recipe is the complete description of one experiment, as a TOML file: read once, and frozen."""
