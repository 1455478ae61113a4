"""Time and memory of a plan before it runs."""
