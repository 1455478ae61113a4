"""Keras models under a plan, on its TensorFlow and torch backends: `make keras-tests`."""
