"""Training: the loop, with its optimiser, state, moving average, metrics and processes."""
