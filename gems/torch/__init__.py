"""The PyTorch door."""
