"""A small llama: RMSNorm, rotary attention on interleaved pairs, SwiGLU; a cache's work inside one pass.

A cache re-rotates old keys (shift, self-extend) and drops some (discard) between batches. The keys' contents
stay as they were computed; only the positions that a later batch sees them at differ. So one pass over a
document can do the same: every batch of queries rotates all the keys before it anew, as `Views` says.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from views import Views

WINDOW = 4352  # n_ctx_train, and the half batch of 512 that self-extend puts above it


@dataclass(frozen=True)
class Shape:
    """The hyperparameters, named as in GGUF metadata."""

    n_vocab: int
    n_embd: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 256
    rope_base: float = 10000.0
    n_slow: int = 8
    norm_eps: float = 1e-5
    embd_std: float = 0.02  # of the embedding's first values
    n_subjects: int = 0  # what the first half is asked for in training; no part of the GGUF

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def usual_frequencies(self) -> Tensor:
        """Radians per position that `rope_base` alone gives, by pair."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        return torch.pow(self.rope_base, -exponent)

    def rope_frequencies(self) -> Tensor:
        """Radians per position, by pair.

        The fast half are the usual ones, for heads that count tokens. The slow half make a quarter turn over
        the whole window: room enough to find a word by its content at any distance inside it, not outside.
        """
        frequencies = self.usual_frequencies()
        frequencies[-self.n_slow :] = math.pi / 2 / WINDOW
        return frequencies

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


class RopeTable:
    """Cosines and sines of every position; `at` gathers them for `rotate`."""

    def __init__(self, shape: Shape, n_positions: int) -> None:
        angle = torch.arange(n_positions, dtype=torch.float64)[:, None] * shape.rope_frequencies()
        self.turns = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)

    def at(self, positions: Tensor) -> Tensor:
        """positions (batch, tokens) -> complex (batch, 1, tokens, head_dim / 2)."""
        return self.turns[positions][:, None]


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x (batch, heads, tokens, head_dim): pairs (2i, 2i + 1) turned by their angle."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


@dataclass
class Step:
    """What one batch of queries attends with, the same in every layer."""

    start: int
    end: int
    query_turn: Tensor
    key_turn: Tensor
    mask: Tensor  # (batch, 1, end - start, end), added to the scores


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n_kv = shape.n_head_kv * shape.head_dim
        self.attn_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        self.attn_q = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.attn_k = nn.Linear(shape.n_embd, n_kv, bias=False)
        self.attn_v = nn.Linear(shape.n_embd, n_kv, bias=False)
        self.attn_output = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        self.ffn_gate = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, shape.n_embd, bias=False)

    def forward(self, x: Tensor, steps: list[Step]) -> Tensor:
        x = x + self._attend(self.attn_norm(x), steps)
        h = self.ffn_norm(x)
        out: Tensor = x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return out

    def _attend(self, x: Tensor, steps: list[Step]) -> Tensor:
        q, k, v = (self._heads(p(x)) for p in (self.attn_q, self.attn_k, self.attn_v))
        folds = self.shape.n_head // self.shape.n_head_kv
        mixed = []
        for step in steps:
            query = rotate(q[:, :, step.start : step.end], step.query_turn)
            key = rotate(k[:, :, : step.end], step.key_turn).repeat_interleave(folds, dim=1)
            value = v[:, :, : step.end].repeat_interleave(folds, dim=1)
            mixed.append(F.scaled_dot_product_attention(query, key, value, attn_mask=step.mask))
        out: Tensor = self.attn_output(torch.cat(mixed, dim=2).transpose(1, 2).flatten(-2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)


class Llama(nn.Module):
    def __init__(self, shape: Shape, n_positions: int = 8192) -> None:
        super().__init__()
        self.shape = shape
        self.rope = RopeTable(shape, n_positions)
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.output_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        self.subject = nn.Linear(shape.n_embd, shape.n_subjects, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                std = self.shape.embd_std if name.startswith("token_embd") else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std / (2 * self.shape.n_layer) ** 0.5 if residual else std)

        nn.init.constant_(self.output_norm.weight, 0.02 / self.shape.embd_std)  # so logits are small at first

    def forward(self, tokens: Tensor, views: Views) -> Tensor:
        """tokens (batch, length) -> normalised hidden states (batch, length, n_embd)."""
        return self.halves(tokens, views)[1]

    def halves(self, tokens: Tensor, views: Views) -> tuple[Tensor, Tensor]:
        """As forward; the hidden states after half of the blocks, normalised without weights, come first."""
        steps, n_half = self._steps(views), self.shape.n_layer // 2
        x = self.token_embd(tokens)
        for block in self.blk[:n_half]:
            x = block(x, steps)
        middle = F.rms_norm(x, (self.shape.n_embd,), eps=self.shape.norm_eps)
        for block in self.blk[n_half:]:
            x = block(x, steps)
        return middle, self.output_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """The embedding is tied: it is the output matrix, too."""
        return hidden @ self.token_embd.weight.T

    def _steps(self, views: Views) -> list[Step]:
        steps = []
        for start, end, positions, bias in views.batches:
            size = end - start
            mask = bias[:, None, None, :].expand(-1, 1, size, -1).clone()
            later = torch.ones(size, size, dtype=torch.bool).triu(1)
            mask[..., start:].masked_fill_(later, float("-inf"))
            turn = self.rope.at(positions)
            own = turn[:, :, start:]
            steps.append(Step(start, end, own, turn, mask))
        return steps
