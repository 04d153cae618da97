"""Figures of attention, filters, augmentation and training runs: vitinit figures."""
