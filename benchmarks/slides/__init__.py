"""How fast tiles come from a slide, and in how much memory."""
