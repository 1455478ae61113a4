"""Published orders, one file each, as reference and test."""
