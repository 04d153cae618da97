"""vitinit.interop.weights: placeholder, say what it is."""
