"""The version, and nothing else, so that the build can read it without importing anything."""

__version__ = "0.2.0"
