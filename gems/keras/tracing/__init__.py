"""From a Keras model to a graph: recording, blocks, what backward saves, costs."""
