"""One network for Keras and the equal one for PyTorch: a stem, residual blocks, a head."""

from __future__ import annotations

from typing import Any

CLASSES = 10


def keras_network(side: int, blocks: int, width: int) -> Any:
    import keras
    from keras import layers

    image = keras.Input((side, side, 3))
    x = layers.Conv2D(width, 3, padding="same", activation="relu")(image)
    for _ in range(blocks):
        more = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        more = layers.Conv2D(width, 3, padding="same")(more)
        x = layers.ReLU()(layers.Add()([x, more]))
    return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def torch_network(blocks: int, width: int) -> Any:
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(width, width, 3, padding=1)
            self.second = nn.Conv2d(width, width, 3, padding=1)
            self.relu = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.relu(x + self.second(self.relu(self.first(x))))

    stem = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
    return nn.Sequential(*stem, *(Block() for _ in range(blocks)), *head)


def batch(samples: int, side: int) -> tuple[Any, Any]:
    """Images with channels last, and labels."""
    import numpy as np

    numbers = np.random.default_rng(0)
    images = numbers.normal(size=(samples, side, side, 3)).astype("float32")
    return images, numbers.integers(0, CLASSES, samples)


def cross_entropy() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd() -> Any:
    import keras

    return keras.optimizers.SGD(1e-3, momentum=0.9)
