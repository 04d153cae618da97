"""What several programs use."""
