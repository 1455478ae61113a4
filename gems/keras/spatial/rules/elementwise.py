"""Ops that compute every cell from the cells at its place: activations, sums, products, masks."""

from __future__ import annotations

from gems.geometry.layout import Layout
from gems.keras.spatial.op import NotTileable, Op, moved, shape_of
from gems.keras.spatial.rule import Rule, Tile, rule
from gems.keras.tracing.subgraph import Tensor

POINTWISE = (
    *("Abs", "Acos", "Acosh", "Add", "AddN", "AddV2", "Asin", "Asinh", "Atan", "Atan2", "Atanh"),
    *("Cast", "Ceil", "ClipByValue", "Cos", "Cosh", "Digamma", "Div", "DivNoNan", "Elu", "Equal"),
    *("Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "Greater"),
    *("GreaterEqual", "Identity", "Inv", "IsFinite", "IsInf", "IsNan", "LeakyRelu", "Less"),
    *("LessEqual", "Lgamma", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum"),
    *("Minimum", "Mod", "Mul", "MulNoNan", "Neg", "NotEqual", "OnesLike", "Pow", "RealDiv"),
    *("Reciprocal", "Relu", "Relu6", "Rint", "Round", "Rsqrt", "Select", "SelectV2", "Selu"),
    *("Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square"),
    *("SquaredDifference", "StopGradient", "Sub", "Tan", "Tanh", "TruncateDiv", "Xdivy"),
    *("Xlogy", "ZerosLike"),
)


@rule(*POINTWISE)
def pointwise(op: Op) -> Rule:
    """Of several inputs the first tiled one decides; the others are brought to its tiles. Whole
    ones as long as the image, such as masks of dropout, are cut."""
    shape = shape_of(op.out)
    out = next((found for t in op.tiled if (found := _whole_size(op, t, shape)) is not None), None)
    if out is None:
        raise NotTileable("gives a tensor of another size than its tiled inputs have")
    for t in op.tiled:
        if _whole_size(op, t, shape, out.dims) is None:
            raise NotTileable("repeats a tiled tensor")

    def write(tile: Tile) -> list[Tensor]:
        return tile.copied(
            [tile.read(t) if t.name in op.layouts else tile.cut(t, out) for t in op.inputs]
        )

    return Rule({op.out.name: out}, {t.name: out.own for t in op.tiled}, write)


def _whole_size(
    op: Op, t: Tensor, shape: tuple[int, ...], dims: tuple[int, ...] | None = None
) -> Layout | None:
    """The layout of a result of this shape like that of an input, which is as long as it where it
    is tiled: along `dims`, if given."""
    layout = op.layouts[t.name]
    if len(layout.shape) != len(shape) or dims not in (None, layout.dims):
        return None
    if any(layout.shape[d] != shape[d] for d in layout.dims):
        return None
    return moved(layout, shape, layout.dims)


@rule("IdentityN")
def identities(op: Op) -> Rule:
    """TensorFlow's own silu ends with one (`gradients.py`)."""
    outs, wants = {}, {}
    for x, y in zip(op.inputs, op.outputs, strict=True):
        if (layout := op.layout(x)) is not None:
            outs[y.name] = moved(layout, layout.shape, layout.dims)
            wants[x.name] = layout.own

    def write(tile: Tile) -> list[Tensor]:
        return [tile.read(t) for t in op.inputs]

    return Rule(outs, wants, write)


@rule("Softmax", "LogSoftmax")
def softmax(op: Op) -> Rule:
    (x,) = op.inputs
    layout = op.only(x)
    if len(layout.shape) - 1 in layout.dims:
        raise NotTileable("sums over a tiled dim")
    return pointwise(op)
