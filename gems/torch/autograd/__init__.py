"""Backward, changed: weight gradients that come later, absent gradients, gradients of norms."""
