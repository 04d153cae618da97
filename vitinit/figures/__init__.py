"""Figures of attention, filters, augmentation and training runs: python -m vitinit.figures."""
