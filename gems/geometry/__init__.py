"""Integers of tiled tensors: boxes, layouts, windows, grids."""
