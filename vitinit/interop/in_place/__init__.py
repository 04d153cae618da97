"""Our inits in models of any library."""
