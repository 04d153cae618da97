"""File bytes → uint8 pictures → keyed draws → batches on the device."""
