"""vitinit.interop: placeholder, say what it is."""
