"""State and activations on the host or on disk, and their way back."""
