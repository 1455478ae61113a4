"""Layer rules, one file per kind of op."""
