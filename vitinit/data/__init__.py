"""From image files to augmented batches on the device; README.md says what each file is for."""
