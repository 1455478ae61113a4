"""Pictures of steps and of models: text, SVG, a page, a trace, tables."""
