"""A gradient that does not exist, where a message is waited for: a bit pattern in its place.

Whether a parameter has a gradient at all decides whether an optimizer touches it: momentum, weight
decay and counts of steps act on a gradient of zeros, and not on None. So a stage that has no
gradient for a value that it received sends that, and the stage before runs backward without it, as
the plain model does. Every receiver waits for a message of a known size; this one is filled with a
NaN whose payload no arithmetic makes.

Reading it would make the host wait for a GPU, in the middle of a step. So gradients on a GPU are
marked, and their messages come with a note in host memory (reshard.py).
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

MARK = "_gems_absent"
# Quiet NaNs. Those of arithmetic have a payload of zeros, or that of an operand.
PATTERN: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FFA_4745_4D53_A5C3),
    torch.float32: (torch.int32, 0x7FDA_45C3),
    torch.float16: (torch.int16, 0x7F5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
}


def by_note(device: torch.device) -> bool:
    """Whether gradients of a device are marked, and not looked at."""
    return device.type == "cuda"


def absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """In place of a gradient of this form."""
    made = torch.empty(shape, dtype=dtype, device=device)
    bits, pattern = _bits(made)
    bits.fill_(pattern)
    return marked(made)


def marked(gradient: Tensor) -> Tensor:
    """The same tensor, known to be absent."""
    setattr(gradient, MARK, True)
    return gradient


def is_absent(gradient: Tensor) -> bool:
    """Whether this stands for no gradient. Looks at one cell, unless that has the pattern."""
    if by_note(gradient.device):
        return getattr(gradient, MARK, False)
    if not gradient.numel() or gradient.dtype.to_real() not in PATTERN:
        return False
    bits, pattern = _bits(gradient)
    if int(bits[(0,) * bits.dim()]) != pattern:
        return False
    return bool((bits == pattern).all())


def _bits(x: Tensor) -> tuple[Tensor, int]:
    real = torch.view_as_real(x) if x.is_complex() else x
    dtype, pattern = PATTERN[real.dtype]
    return real.view(dtype), pattern
