"""Run recorded calls on boxes: a table of layer kinds, one exchange, and their adjoints."""
