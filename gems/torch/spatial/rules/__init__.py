"""How each kind of layer runs on tiles."""
