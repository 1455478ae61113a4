"""Weights, gradients and optimizer state: who has which part, and how they change."""
