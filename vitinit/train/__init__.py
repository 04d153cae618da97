"""Training: the engine, with its optimiser, moving average, checkpoints, metrics and processes."""
