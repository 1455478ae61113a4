"""Choosing: where to cut, and which plan."""
