"""Other libraries' weights, and our inits in other libraries' models."""
