"""Other libraries' files of weights, in and out."""
