"""From an nn.Module to a graph: recording, guards, costs."""
