"""Weights of one rank: which it has, gradients to reduce, running statistics."""
