"""Choosing: how to partition, and which plan."""
