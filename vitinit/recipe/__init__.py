"""Recipes: one experiment each, as a complete and flat TOML file; read once, checked, then frozen."""
