"""What sees a run and never changes it."""
