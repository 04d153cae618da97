"""What every other folder may use, and what imports none of them."""
