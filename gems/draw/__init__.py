"""Pictures of schedules and timelines: text, SVG and tables."""
