"""All that imports PyTorch."""
