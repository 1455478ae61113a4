"""Stages of Keras models on tiles: layouts, halos, the local graph of one rank."""
