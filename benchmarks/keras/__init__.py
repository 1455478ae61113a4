"""Keras models under a plan beside plain Keras, the PyTorch front end and tf.distribute."""
