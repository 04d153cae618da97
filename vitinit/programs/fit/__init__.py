"""From a folder of photographs to a trained model, within so many minutes."""
