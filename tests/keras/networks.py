"""Small Keras networks of every kind, and batches for them. Not a test itself."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

CLASSES = 5


def unet() -> Any:
    """Skips over all levels, transposed convolution, BatchNormalization, dropout."""

    def block(x: Any, channels: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    image = keras.Input((16, 16, 3))
    a = block(image, 4)
    b = block(layers.MaxPooling2D()(a), 8)
    c = block(layers.MaxPooling2D()(b), 8)
    up = layers.Conv2DTranspose(8, 2, strides=2)(c)
    up = block(layers.Concatenate()([up, b]), 8)
    up = layers.UpSampling2D()(up)
    up = layers.Dropout(0.3)(block(layers.Concatenate()([up, a]), 4))
    return keras.Model(image, layers.GlobalAveragePooling2D()(layers.Conv2D(CLASSES, 1)(up)))


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """Operations between layers, a layer that is called three times, dropout called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Conv2D(4, 3, padding="same", strides=2)
        self.norm = layers.BatchNormalization()
        self.again = layers.Conv2D(4, 3, padding="same")
        self.pool = layers.GlobalMaxPooling2D()
        self.drop = layers.Dropout(0.3)
        self.head = layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        x = keras.ops.relu(self.norm(self.first(x)))
        for _ in range(3):
            x = x + keras.ops.gelu(self.again(x))
        return self.head(self.drop(self.drop(self.pool(x))))


def subclassed() -> Any:
    model = Subclassed()
    model(np.zeros((1, 16, 16, 3)))
    return model


def nested() -> Any:
    """A Sequential in a functional model, regularizers of weights and of activities, LayerScale."""
    inner = keras.Sequential(
        [
            layers.Conv2D(4, 3, padding="same", kernel_regularizer="l2"),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("silu", activity_regularizer=keras.regularizers.L2(1e-3)),
        ]
    )
    image = keras.Input((16, 16, 3))
    x = layers.SeparableConv2D(6, 3, padding="same", depthwise_regularizer="l1")(inner(image))
    x = layers.LayerNormalization()(x)
    x = layers.GroupNormalization(3)(layers.AveragePooling2D(4)(x))
    x = layers.Dense(8, activation="softmax")(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(CLASSES, bias_regularizer="l2")(x))


def several() -> Any:
    """Two inputs, two outputs, a layer shared by both paths, a frozen layer, a frozen norm."""
    left, right = keras.Input((8, 8, 3), name="left"), keras.Input((12,), name="right")
    norm = layers.BatchNormalization()
    norm.trainable = False
    a = layers.Flatten()(layers.Conv2D(2, 3)(norm(left)))
    frozen = layers.Dense(12)
    frozen.trainable = False
    a, shared = frozen(a), layers.Dense(6, activation="tanh")
    b = layers.Dropout(0.5)(shared(right))
    a = layers.Dense(6)(shared(a))
    both = layers.Multiply()([a, b])
    one, two = layers.Dense(CLASSES, name="one")(both), layers.Dense(2, name="two")(b)
    return keras.Model([left, right], [one, two])


def images(batches: int = 2, samples: int = 8, side: int = 16) -> list[tuple[Any, Any]]:
    numbers = np.random.default_rng(1)
    return [
        (numbers.normal(size=(samples, side, side, 3)), numbers.integers(0, CLASSES, samples))
        for _ in range(batches)
    ]


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
