"""Integers of tensors that are cut: boxes, layouts, windows, grids."""
