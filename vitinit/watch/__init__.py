"""vitinit.watch: placeholder, say what it is."""
