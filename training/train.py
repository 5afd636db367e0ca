"""Trains the passkey model: `python training/train.py --out DIR`. Stop it, start it again, and it goes on.

What a step trains on follows from the seed and the step's number alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from corpus import ANSWER_LOSS, Corpus, Document, build_tokenizer
from model import WINDOW, Llama, Shape
from torch import Tensor, nn
from views import Cache, cut, random_cache, stack

SEED = 20261121
CHECKPOINT = "checkpoint.pt"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h
SAVE_EVERY, REPORT_EVERY = 50, 25


@dataclass(frozen=True)
class Stage:
    """A step takes 2,048 tokens of documents of `shortest` to `longest` tokens, decoded in `n_batches`,
    seen as far apart as `reach`."""

    n_steps: int
    shortest: int
    longest: int
    n_batches: int
    reach: int
    rate: tuple[float, float]  # learning rate, from and to


TOKENS = 2048
STAGES = [
    Stage(1100, shortest=96, longest=96, n_batches=1, reach=96, rate=(5e-3, 5e-3)),
    Stage(2400, shortest=112, longest=240, n_batches=3, reach=WINDOW, rate=(5e-3, 2e-4)),
]
WARM_UP = 50
N_STEPS = sum(stage.n_steps for stage in STAGES)


def stage_at(step: int) -> tuple[Stage, float]:
    """The stage that `step` is in, and its learning rate."""
    first = 0
    for stage in STAGES:
        if step < first + stage.n_steps:
            break
        first += stage.n_steps
    start, end = stage.rate
    return stage, (start + (end - start) * (step - first) / stage.n_steps) * min(1.0, (step + 1) / WARM_UP)


def documents_of(corpus: Corpus, stage: Stage) -> tuple[list[Document], list[Cache]]:
    length = int(corpus.rng.integers(stage.shortest, stage.longest + 1))
    sizes = cut(corpus.rng, length, stage.n_batches)
    documents = [corpus.draw(length) for _ in range(TOKENS // length)]
    return documents, [random_cache(corpus.rng, sizes, np.array(d.filler), stage.reach) for d in documents]


def loss_of(model: Llama, documents: list[Document], caches: list[Cache]) -> tuple[Tensor, float]:
    """Weighted cross-entropy (over one filler token in eight), and the share of answer tokens got right."""
    ids = torch.tensor([d.ids for d in documents])
    weight = torch.tensor([d.loss for d in documents])[:, 1:]
    light = (weight > 0) & (weight < 0.1)
    weight = torch.where(light, 8 * weight * (torch.rand(weight.shape) < 1 / 8), weight)
    picked = weight > 0
    logits = model.logits(model(ids, stack(caches))[:, :-1][picked])
    target, weight = ids[:, 1:][picked], weight[picked]
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    answers = weight == ANSWER_LOSS
    right = (logits[answers].argmax(-1) == target[answers]).float().mean()
    return loss, float(right) if answers.any() else 1.0


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices (it learns to copy in a third of AdamW's steps), AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [w for name, w in named if w.dim() == 2 and not name.startswith("token_embd")]
    others = [w for name, w in named if w.dim() != 2 or name.startswith("token_embd")]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def save(path: Path, step: int, seconds: float, model: Llama, optims: list[torch.optim.Optimizer]) -> None:
    state = {
        "step": step,
        "seconds": seconds,
        "shape": model.shape.to_dict(),
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optims],
    }
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def load_model(path: Path) -> Llama:
    state = torch.load(path, weights_only=True)
    model = Llama(Shape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model.eval()


def keep_freed_memory() -> None:
    """Tells glibc to keep big blocks for the next step; fetching them anew costs half of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def train(out: Path) -> None:
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer()
    model = Llama(Shape(len(tokenizer)))
    optims = optimizers(model)
    first, seconds = 0, 0.0
    if (out / CHECKPOINT).exists():
        state = torch.load(out / CHECKPOINT, weights_only=True)
        first, seconds = state["step"], state["seconds"]
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optimizers"], strict=True):
            optim.load_state_dict(saved)
    losses, rights, since = [], [], time.monotonic()
    for step in range(first, N_STEPS):
        torch.manual_seed(SEED + step)
        corpus = Corpus(tokenizer, np.random.default_rng([SEED, step]))
        stage, rate = stage_at(step)
        loss, right = loss_of(model, *documents_of(corpus, stage))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim, scale in zip(optims, (1.0, 0.4), strict=True):
            for group in optim.param_groups:
                group["lr"] = rate * scale
            optim.step()
            optim.zero_grad()
        losses.append(float(loss.detach()))
        rights.append(right)
        if (step + 1) % REPORT_EVERY == 0:
            now = time.monotonic()
            seconds, since = seconds + now - since, now
            loss_mean, right_mean = round(float(np.mean(losses)), 4), round(float(np.mean(rights)), 4)
            row = {"step": step + 1, "seconds": round(seconds), "loss": loss_mean, "answers": right_mean}
            line = json.dumps(row)
            print(line, flush=True)
            with open(out / "curve.jsonl", "a") as curve:
                curve.write(line + "\n")
            losses, rights = [], []
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == N_STEPS:
            save(out / CHECKPOINT, step + 1, seconds, model, optims)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and the curve")
    parser.add_argument("--threads", type=int, default=1, help="one is fastest for matrices this small [1]")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    train(arguments.out)


if __name__ == "__main__":
    main()
