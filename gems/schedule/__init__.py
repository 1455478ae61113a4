"""The order of actions: what it may be, what published systems chose, and the best we can find."""
