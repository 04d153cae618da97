"""What a run leaves behind, and how it is read back: continued, compared, evaluated."""
