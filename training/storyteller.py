"""Trains a deep, narrow llama together with its draft head: `python training/storyteller.py OUT.gguf`.

The model learns to say what stories260K says, in texts which that one writes, and the head what the model
will say. A head of one layer is cheap beside many: that is what the speed of drafts hangs on
(docs/many-requests.md).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from draft_head import LAYER, Head, Weights, divergence, losses, same, texts, trunk, write
from muon import Muon
from torch import Tensor, nn

SMALL = Path("tests/data/stories260K.gguf")
N_HEAD, N_FF = 4, 192  # few heads: attention is what rows beside each other share least
NAME = "a storyteller with a draft head"
SEED = 20261128


class Llama(nn.Module):
    """A teacher's words and output, and else random weights; by their names in GGUF, as Weights has them."""

    def __init__(self, teacher: Weights, n_layer: int) -> None:
        super().__init__()
        self.n_layer, self.n_embd, self.eps = n_layer, teacher.n_embd, teacher.eps
        self.n_head = self.n_head_kv = N_HEAD
        self.head_dim = self.n_embd // N_HEAD
        self.fields = teacher.fields | {"llama.feed_forward_length": N_FF}
        self.weights = {}
        for name in ("token_embd.weight", "output_norm.weight", "output.weight"):
            self.weights[name] = nn.Parameter(teacher[name].clone())
        n = self.n_embd
        shapes = {"ffn_gate": (N_FF, n), "ffn_up": (N_FF, n), "ffn_down": (n, N_FF)}
        for layer in range(n_layer):
            for name in LAYER:
                if name.endswith("norm"):
                    weight = torch.ones(n)
                else:
                    shape = shapes.get(name, (n, n))
                    weight = torch.randn(shape) / math.sqrt(shape[1])
                    if name in ("attn_output", "ffn_down"):  # layers add up
                        weight /= math.sqrt(2 * n_layer)
                self.weights[f"blk.{layer}.{name}.weight"] = nn.Parameter(weight)
        for name, weight in self.weights.items():
            self.register_parameter(name.replace(".", "_"), weight)

    def number(self, key: str) -> int:
        return int(self.fields[f"llama.{key}"])

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """As they are written."""
        return {name: weight.detach().numpy() for name, weight in self.weights.items()}


def losses_of_both(teacher: Weights, head: Head, tokens: Tensor) -> tuple[Tensor, list[float]]:
    """The loss of the model and its head, and shares: how often the model's likeliest token is the teacher's,
    and each token of a draft the model's.
    """
    with torch.no_grad():
        _, taught = trunk(teacher, tokens)
    states, logits = trunk(head.of, tokens)
    of_head, held = losses(head, tokens, states, logits.detach())
    return divergence(logits, taught) + of_head, [same(logits, taught), *held]


def train(
    teacher: Weights, head: Head, data: Tensor, minutes: float, batch: int, rate: float, out: Path
) -> None:
    named = list(head.named_parameters())  # the model's are among them
    ends = ("of.token_embd", "of.output")
    muon = Muon(w for name, w in named if w.dim() == 2 and not name.startswith(ends))
    others = [w for name, w in named if w.dim() != 2 or name.startswith(ends)]
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    held_out, rest = data[:32], data[32:]
    begin, step = time.process_time(), 0
    while (share := (time.process_time() - begin) / 60 / minutes) < 1:
        loss, _ = losses_of_both(teacher, head, rest[torch.randint(len(rest), (batch,))])
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        now = rate * min(1, (step + 1) / 50) * (0.02 + 0.98 * min(1, 1.5 * (1 - share)))
        muon.step(now)
        for group in adam.param_groups:
            group["lr"] = 0.4 * now
        adam.step()
        adam.zero_grad()
        if step % 20 == 0:
            with torch.no_grad():
                loss, shares = losses_of_both(teacher, head, held_out)
            seconds = time.process_time() - begin
            found = [round(each, 3) for each in shares]
            print(f"{step} {seconds:.0f} s, loss {loss:.3f}, the same {found}", flush=True)
            write(head.of, head, out, NAME)  # so that it may be stopped
        step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=24, help="[24]")
    parser.add_argument("--texts", type=int, default=4000, help="that the teacher writes [4000]")
    parser.add_argument("--minutes", type=float, default=14, help="of processor time [14]")
    parser.add_argument("--batch", type=int, default=8, help="texts in a step [8]")
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate [4e-3]")
    parser.add_argument("--threads", type=int, default=1, help="[1]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    teacher = Weights(SMALL)
    model = Llama(teacher, arguments.layers)
    head = Head(model)
    n_all, n_own = (sum(w.numel() for w in part.parameters()) for part in (head, model))
    print(f"{n_own} weights, and {n_all - n_own} of the head", flush=True)
    with torch.no_grad():
        data = texts(teacher, arguments.texts)
    data = data[torch.randperm(len(data))]
    print(f"{tuple(data.shape)} tokens after {time.process_time():.0f} s", flush=True)
    train(teacher, head, data, arguments.minutes, arguments.batch, arguments.rate, arguments.out)
    write(model, head, arguments.out, NAME)


if __name__ == "__main__":
    main()
