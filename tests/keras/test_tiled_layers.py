"""Layers on tiles against the same stage on one rank: values, updates, gradients of the input and
of all weights, in float64. Where TensorFlow knows float32 only, to its precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from gems.geometry.layout import even
from gems.keras.spatial.partition import CannotRun, lay_out
from gems.keras.tracing.trace import trace
from tests.keras.tiles import compare

EXACT, FLOAT32 = 1e-12, 2e-6
LINE, IMAGE, VOLUME = (2, 9, 4), (2, 7, 6, 4), (1, 5, 4, 6, 4)
Make = Callable[[], Any]


def after(*made: Any) -> Any:
    """Behind a layer whose result does not arrive with halos, as what enters a stage does."""
    return keras.Sequential([layers.Activation("tanh", name="before"), *made])


def first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same with channels first."""
    return shape[0], shape[-1], *shape[1:-1]


KERNELS = [
    (kernel, stride, padding, dilation, sizes)
    for kernel, stride, padding, dilation in (
        *(
            (k, s, p, 1)
            for k, s in ((1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (2, 3), (5, 3))
            for p in ("same", "valid")
        ),
        *((3, 1, p, 2) for p in ("same", "valid")),
    )
    for sizes in (((7, 6),) if stride == 1 else ((7, 6), (5, 9)))
]


@pytest.mark.parametrize("part", range(4))
def test_convolution_and_pooling_for_any_kernel(part: int) -> None:
    """Five layers on one image, for each kernel, stride, padding, dilation and size."""
    for kernel, stride, padding, dilation, sizes in KERNELS[part::4]:
        window: dict[str, Any] = {"strides": stride, "padding": padding}

        def every(x: Any, k: int = kernel, d: int = dilation, w: Any = window) -> Any:
            x = layers.Activation("tanh")(x)
            found = [
                layers.Conv2D(3, k, dilation_rate=d, **w)(x),
                layers.DepthwiseConv2D(k, depth_multiplier=2, dilation_rate=d, **w)(x),
            ]
            if d == 1:
                found += [layers.MaxPool2D(k, **w)(x), layers.AveragePooling2D(k, **w)(x)]
                found.append(layers.Conv2DTranspose(3, k, **w)(x))
            return found

        found = compare(every, (1, *sizes, 2), (2, 2))
        assert found.worst < EXACT, (kernel, stride, padding, dilation, sizes)
        assert not found.laid.gathered()


DIMS: dict[str, tuple[Make, tuple[int, ...], tuple[int, ...]]] = {
    "Conv1D": (lambda: layers.Conv1D(3, 3, padding="same"), LINE, (3,)),
    "Conv1D causal": (lambda: layers.Conv1D(3, 3, padding="causal", dilation_rate=2), LINE, (3,)),
    "Conv1D dilated": (lambda: layers.Conv1D(3, 3, padding="same", dilation_rate=2), LINE, (2,)),
    "Conv2D in groups": (lambda: layers.Conv2D(4, 3, 2, padding="same", groups=2), IMAGE, (2, 2)),
    "Conv3D": (lambda: layers.Conv3D(3, 3, 2, padding="same"), VOLUME, (2, 1, 2)),
    "Conv3D dilated": (lambda: layers.Conv3D(2, 2, dilation_rate=2), VOLUME, (2, 2)),
    "DepthwiseConv1D": (lambda: layers.DepthwiseConv1D(3, padding="same"), LINE, (3,)),
    "SeparableConv1D": (lambda: layers.SeparableConv1D(3, 3, padding="same"), LINE, (3,)),
    "SeparableConv2D": (lambda: layers.SeparableConv2D(3, 3, 2, padding="same"), IMAGE, (2, 2)),
    "Conv1DTranspose": (lambda: layers.Conv1DTranspose(3, 3, 2, padding="same"), LINE, (3,)),
    "Conv2DTranspose": (
        lambda: layers.Conv2DTranspose(2, 3, 2, padding="same", output_padding=1),
        IMAGE,
        (2, 2),
    ),
    "Conv3DTranspose": (lambda: layers.Conv3DTranspose(2, 3, 2, padding="same"), VOLUME, (2, 2)),
    "MaxPool1D": (lambda: layers.MaxPool1D(3, 2, padding="same"), LINE, (3,)),
    "AveragePooling1D": (lambda: layers.AveragePooling1D(3, 2, padding="same"), LINE, (3,)),
}


@pytest.mark.parametrize("name", DIMS)
def test_convolution_in_one_to_three_dims(name: str) -> None:
    make, shape, grid = DIMS[name]
    found = compare(after(make()), shape, grid)
    assert found.worst < EXACT
    assert not found.laid.gathered()


@pytest.mark.parametrize("kind", ["MaxPool3D", "AveragePooling3D"])
def test_pooling_of_volumes_in_float32(kind: str) -> None:
    """TensorFlow has them for no other type."""
    pool = getattr(layers, kind)(3, 2, padding="same", dtype="float32")
    found = compare(after(pool), VOLUME, (2, 1, 2))
    assert found.worst < FLOAT32
    assert not found.laid.gathered()


NORMS: dict[str, tuple[Make, tuple[int, ...], tuple[int, ...] | None]] = {
    "BatchNormalization": (layers.BatchNormalization, IMAGE, None),
    "BatchNormalization, channels first": (
        lambda: layers.BatchNormalization(axis=1), first(IMAGE), (2, 3),
    ),
    "LayerNormalization": (layers.LayerNormalization, IMAGE, None),
    "LayerNormalization over the image": (
        lambda: layers.LayerNormalization(axis=[1, 2, 3]), IMAGE, None,
    ),
    "GroupNormalization": (lambda: layers.GroupNormalization(2), IMAGE, None),
    "GroupNormalization, channels first": (
        lambda: layers.GroupNormalization(2, axis=1), first(IMAGE), (2, 3),
    ),
    "UnitNormalization": (layers.UnitNormalization, IMAGE, None),
    "RMSNormalization": (layers.RMSNormalization, IMAGE, None),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_take_their_statistics_over_the_group(name: str) -> None:
    make, shape, dims = NORMS[name]
    found = compare(after(make()), shape, (2, 2), dims)
    assert found.worst < EXACT
    assert not found.laid.gathered()


FORMS: dict[str, tuple[Make, tuple[int, ...], tuple[int, ...] | None]] = {
    "UpSampling1D": (lambda: layers.UpSampling1D(3), LINE, None),
    "UpSampling2D": (lambda: layers.UpSampling2D((2, 3)), IMAGE, None),
    "UpSampling2D, channels first": (
        lambda: layers.UpSampling2D(2, data_format="channels_first"), first(IMAGE), (2, 3),
    ),
    "UpSampling3D": (lambda: layers.UpSampling3D(2), VOLUME, None),
    "Resizing to the nearest": (
        lambda: layers.Resizing(5, 11, interpolation="nearest"), IMAGE, None,
    ),
    "ZeroPadding2D": (lambda: layers.ZeroPadding2D(((1, 2), (0, 3))), IMAGE, None),
    "ZeroPadding3D, channels first": (
        lambda: layers.ZeroPadding3D(2, data_format="channels_first"), first(VOLUME), (2, 3, 4),
    ),
    "Cropping1D": (lambda: layers.Cropping1D((2, 1)), LINE, None),
    "Cropping2D": (lambda: layers.Cropping2D(((1, 2), (3, 1))), IMAGE, None),
    "Cropping3D": (lambda: layers.Cropping3D(((1, 0), (1, 1), (2, 0))), VOLUME, None),
    "strided slices": (lambda: layers.Lambda(lambda x: x[:, 1::2, -5:-1, 1:]), IMAGE, None),
    "a slice that drops channels": (lambda: layers.Lambda(lambda x: x[:, 2:, None, :, 0]), IMAGE,
                                    None),
    "Permute": (lambda: layers.Permute((2, 3, 1)), IMAGE, None),
    "Reshape of channels": (lambda: layers.Reshape((7, 6, 2, 2)), IMAGE, None),
    "split and joined": (
        lambda: layers.Lambda(lambda x: tf.stack(tf.unstack(tf.concat(tf.split(x, 2, -1)[::-1], -1),
                                                            axis=-1)[:2], 1)), IMAGE, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_what_moves_cells_only(name: str) -> None:
    make, shape, dims = FORMS[name]
    grid = (2,) * (len(shape) - 2)
    found = compare(after(make()), shape, grid, dims)
    assert found.worst < EXACT
    assert not found.laid.gathered()


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_bilinear_resizing_is_float32_as_tensorflow_s(data_format: str) -> None:
    shape, dims = (IMAGE, None) if data_format == "channels_last" else (first(IMAGE), (2, 3))
    up = layers.UpSampling2D(2, interpolation="bilinear", data_format=data_format)
    found = compare(after(up), shape, (2, 2), dims)
    assert found.worst < FLOAT32
    assert not found.laid.gathered()


def test_pointwise_layers_and_masks_keyed_alike() -> None:
    def every(x: Any) -> Any:
        x = layers.Activation("tanh")(x)
        kinds = ("relu", "silu", "gelu", "hard_sigmoid", "hard_swish", "softplus", "celu", "elu")
        found = [layers.Activation(kind)(x) for kind in kinds]
        found += [layers.PReLU()(x), layers.PReLU(shared_axes=[1, 2])(x), layers.Softmax()(x)]
        found += [layers.Dropout(0.3)(x), layers.SpatialDropout2D(0.3)(x)]
        found += [layers.GaussianNoise(0.1)(x), layers.GaussianDropout(0.3)(x)]
        found += [layers.Rescaling(0.1, offset=-1)(x), layers.Dense(3)(x), layers.ReLU(0.5)(x)]
        found += [layers.Normalization(mean=np.arange(4.0), variance=np.arange(1.0, 5))(x)]
        joined = layers.Concatenate()([*found[:2], layers.Multiply()(found[2:4])])
        return [*found, layers.Add()([x, *found[4:6]]), joined]

    found = compare(every, IMAGE, (2, 2))
    assert found.worst < EXACT
    assert not found.laid.gathered()
    assert len(found.stages[0].segments) == 1  # nothing is exchanged


@pytest.mark.parametrize("keeps", [True, False])
def test_global_pooling_sums_over_the_group(keeps: bool) -> None:
    def every(x: Any) -> Any:
        x = layers.ReLU()(x)  # many cells have the extreme, and share its gradient
        return [
            layers.GlobalAveragePooling2D(keepdims=keeps)(x),
            layers.GlobalMaxPooling2D(keepdims=keeps)(x),
            layers.Lambda(lambda x: -keras.ops.min(x, axis=(1, 2), keepdims=keeps))(x),
        ]

    found = compare(every, IMAGE, (2, 2))
    assert found.worst < EXACT
    assert not found.laid.gathered()


def test_losses_of_activities_are_of_the_whole_image() -> None:
    assert (
        compare(after(layers.ActivityRegularization(l1=0.1, l2=0.2)), IMAGE, (2, 2)).worst < EXACT
    )


def test_what_has_no_exact_form_is_gathered_and_named() -> None:
    head = after(layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(3, activation="softmax"))
    found = compare(head, IMAGE, (2, 2))
    assert found.worst < EXACT
    (line,) = found.laid.gathered()
    assert "flatten" in line and "merges a tiled dim" in line
    assert found.laid.gathered_bytes() == 2 * 5 * 4 * 2 * 8


@pytest.mark.parametrize("halves", [False, True])
def test_more_tiles_than_cells(halves: bool) -> None:
    """Ranks without a cell send, receive and sum nothing, but what is whole they compute."""
    net = after(
        layers.Conv2D(3, 3, strides=2, padding="same"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(3, 3, strides=2, padding="same"),
        layers.MaxPool2D(3, 2, padding="same"),
        layers.Conv2DTranspose(2, 3, strides=2, padding="same"),
        layers.AveragePooling2D(2, padding="same"),
        layers.GlobalMaxPooling2D(),
    )
    assert compare(net, (2, 5, 6, 4), (2, 3), halves=halves).worst < EXACT


def test_saved_bytes_are_those_of_tiles_and_halos_not_of_padded_copies() -> None:
    net = after(layers.Conv2D(4, 3, padding="same"), layers.ReLU(), layers.Conv2D(4, 3))
    found = compare(net, (1, 16, 16, 4), (1, 2))
    stage = found.stages[0]
    tile, row = 16 * 8 * 4 * 8, 16 * 4 * 8
    # Twice the tile before a convolution, with one column of its neighbour.
    assert stage.saved_bytes == 2 * (tile + row)


@tf.custom_gradient
def clipped(x: Any) -> Any:
    return x * 2, lambda g: tf.clip_by_value(g, -1.0, 1.0)


@pytest.mark.parametrize("before", [[], [layers.GlobalAveragePooling2D]])
def test_a_custom_gradient_is_rejected_by_name(before: list[Any]) -> None:
    image = keras.Input(IMAGE[1:], batch_size=2)
    x = layers.Dense(4)(image)
    for make in before:
        x = make()(x)
    model = keras.Model(image, layers.Lambda(clipped, name="clipped")(x))
    r = trace(model, tf.TensorSpec(IMAGE, "float64"), training=True)
    ops = [op for block in r.ops for op in block]
    with pytest.raises(CannotRun, match=r"clipped.*has a gradient of its own"):
        lay_out(ops, {r.inputs[0].name: even(IMAGE, (1, 2), (2, 2))}, (2, 2), r.forward)
