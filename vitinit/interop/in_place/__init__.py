"""vitinit.interop.in_place: placeholder, say what it is."""
