"""Vision transformer: an image as a sequence of patches behind a class token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def vit_base(
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 224,
    patch: int = 16,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    dropout: float = 0.0,
) -> ViT:
    """ViT-B/16 at 224², 86,567,656 parameters; the other options make others.

    The position embedding belongs to one image size, so the network takes no other.
    """
    problems = [
        f"{name} {whole} is not a multiple of {part_name} {part}"
        for name, whole, part_name, part in (
            ("image_size", image_size, "patch", patch),
            ("width", width, "heads", heads),
        )
        if whole % part
    ]
    if problems:
        raise ValueError(f"this ViT cannot be built: {'; '.join(problems)}")
    model = ViT(num_classes, in_channels, image_size, patch, width, depth, heads, dropout)
    nn.init.normal_(model.position, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return model


class ViT(nn.Module):
    """Patches to tokens, a class token in front, transformer blocks, linear on the class token."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        image_size: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        tokens = (image_size // patch) ** 2 + 1
        self.patches = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, tokens, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.dropout(x + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Every token looks at every token, `heads` times over."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.p = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        return self.dropout(self.out(y.transpose(1, 2).reshape(batch, tokens, width)))
