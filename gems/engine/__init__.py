"""Carrying out a schedule, whatever the framework."""
