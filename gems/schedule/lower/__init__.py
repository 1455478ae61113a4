"""Lowering passes: from the order of compute actions to what ranks carry out."""
