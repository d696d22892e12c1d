"""Plain modules for the checkpoints that no transformers model gives. Small ones load like large ones."""

from __future__ import annotations

import torch
from torch import nn


class ManySmall(nn.Module):
    """Many parameters of 4 KiB in bf16, in blocks."""

    ROWS, COLUMNS, PER_BLOCK = 32, 64, 160

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block() for _ in range(num_blocks))

    def _block(self) -> nn.ParameterList:
        shape = (self.ROWS, self.COLUMNS)
        return nn.ParameterList(torch.empty(shape, dtype=torch.bfloat16) for _ in range(self.PER_BLOCK))


class Table(nn.Module):
    """One bf16 parameter without values: `nn.Embedding` would draw them all."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, num_columns, dtype=torch.bfloat16))


class OneHuge(nn.Module):
    """One large parameter beside a few small ones, bf16; none at the root, where accelerate's loader finds none."""

    COLUMNS = 4096

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128, dtype=torch.bfloat16) for _ in range(3))
        self.embed = Table(num_rows, self.COLUMNS)
        self.norm = nn.LayerNorm(self.COLUMNS, bias=False, dtype=torch.bfloat16)


class OddRows(nn.Module):
    """Row counts that no world size divides, fewer rows than ranks, ties, 0-dim parameters, and buffers; fp32."""

    VOCABULARY, WIDTH = 10_007, 521

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(num_blocks))
        self.narrow = nn.Parameter(torch.empty(3, 11))
        self.scale = nn.Parameter(torch.empty(()))
        self.norm = nn.BatchNorm1d(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(7, 5, dtype=torch.int32))
        self.register_buffer("positions", torch.arange(9), persistent=False)


class Quantized(nn.Module):
    """float8 weights with an fp32 scale for each tile, as quantised checkpoints hold them; nothing is trainable."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(QuantizedLinear(width) for _ in range(num_blocks))


class QuantizedLinear(nn.Module):
    """One quantised matrix."""

    TILE = 128

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.empty(width, width, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.empty(width // self.TILE, width // self.TILE), requires_grad=False)
