"""File bytes → uint8 images → keyed draws → batches on the device."""
