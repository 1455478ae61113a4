"""What holds of a tensor in any stage: its strides, its memory, its random numbers."""
