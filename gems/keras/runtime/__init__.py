"""Running the stages of one rank on TensorFlow: forward, backward, recomputation, messages."""
