"""Figures: what an init makes of attention, how runs went, what augmentation does to images."""
