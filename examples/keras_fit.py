"""How do I train a Keras model that is too large for one device, by its own fit?

    torchrun --nproc-per-node 2 examples/keras_fit.py

with KERAS_BACKEND=tensorflow, the default, or torch. One call stands between compile and fit; the
history is that of `python examples/keras_fit.py`, on one process.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

import gems
import gems.keras


def network() -> keras.Model:
    """A small network with a skip connection. A large one is built under gems.keras.lazily()."""
    x = inputs = keras.Input((16, 16, 3))
    x = skip = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = layers.Conv2D(8, 3, padding="same")(x)
    x = layers.Add()([layers.GroupNormalization(2)(x), skip])
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    return keras.Model(inputs, layers.Dense(2)(x))


keras.utils.set_random_seed(0)
dice = np.random.default_rng(0)
images = dice.normal(size=(64, 16, 16, 3)).astype("float32")
labels = (images.mean((1, 2, 3)) > 0).astype("int64")

with gems.keras.lazily():  # each rank makes the weights of its own stages
    model = network()
model.compile(
    keras.optimizers.Adam(3e-2),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
stages = 2 if "WORLD_SIZE" in os.environ else 1
gems.keras.distribute(model, gems.Plan(stages=stages, micro_batches=4, schedule="1f1b"))

history = model.fit(images, labels, batch_size=16, epochs=3, validation_split=0.25, verbose=0)
if model.gems.rank == 0:
    print(f"ran {model.gems.plan.schedule} on {model.gems.plan.world} ranks")
    for epoch, loss in enumerate(history.history["loss"]):
        accuracy = history.history["val_accuracy"][epoch]
        print(f"epoch {epoch}: loss {loss:.5f}, validation accuracy {accuracy:.3f}")
    print("expect the same lines from one process and from two, but for the first")
model.gems.close()
