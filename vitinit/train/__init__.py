"""The engine and what it keeps: optimiser, moving average, checkpoints, metrics, processes."""
