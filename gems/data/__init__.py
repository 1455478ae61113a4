"""What to train on: sources of numbered samples (slides, volumes, CIFAR-10, folders of pictures,
noise), and the loader that makes batches of them. Each rank reads only its own box."""
