"""Trains a model: `python training/train.py --model NAME --out DIR`. Stop it, start it again, and it goes on.

What a step trains on follows from the seed and the step's number alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from document import ANSWER_LOSS, Document
from model import Llama, Shape
from recipes import RECIPES, AnyCorpus, Stage
from torch import Tensor, nn
from views import Cache, cut, stack

CHECKPOINT = "checkpoint.pt"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h
SAVE_EVERY, REPORT_EVERY = 50, 25


TOKENS = 2048
SUBJECT_LOSS = 0.3
WARM_UP = 50


def stage_at(stages: list[Stage], step: int) -> tuple[Stage, float]:
    """The stage that `step` is in, and its learning rate."""
    first = 0
    for stage in stages:
        if step < first + stage.n_steps:
            break
        first += stage.n_steps
    start, end = stage.rate
    return stage, (start + (end - start) * (step - first) / stage.n_steps) * min(1.0, (step + 1) / WARM_UP)


def documents_of(corpus: AnyCorpus, stage: Stage) -> tuple[list[Document], list[Cache]]:
    length = int(corpus.rng.integers(stage.shortest, stage.longest + 1))
    sizes = cut(corpus.rng, length, stage.n_batches)
    return corpus.step(TOKENS // length, sizes, stage.reach)


def loss_of(model: Llama, documents: list[Document], caches: list[Cache]) -> tuple[Tensor, float]:
    """Weighted cross-entropy (over one filler token in eight), and the share of answer tokens got right."""
    ids = torch.tensor([d.ids for d in documents])
    weight = torch.tensor([d.loss for d in documents])[:, 1:]
    light = (weight > 0) & (weight < 0.1)
    weight = torch.where(light, 8 * weight * (torch.rand(weight.shape) < 1 / 8), weight)
    picked = weight > 0
    middle, hidden = model.halves(ids, stack(caches))
    logits = model.logits(hidden[:, :-1][picked])
    target, weight = ids[:, 1:][picked], weight[picked]
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    answers = weight == ANSWER_LOSS
    right = (logits[answers].argmax(-1) == target[answers]).float().mean()
    return loss + subject_loss(model, middle, documents), float(right) if answers.any() else 1.0


def subject_loss(model: Llama, middle: Tensor, documents: list[Document]) -> Tensor:
    """Cross-entropy of what the model's first half should know to be the subject."""
    places = [(row, *place) for row, d in enumerate(documents) for place in d.subjects.items()]
    if not places:
        return torch.zeros(())
    rows, columns, subjects = torch.tensor(places).unbind(1)
    return SUBJECT_LOSS * F.cross_entropy(model.subject(middle[rows, columns]), subjects)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices (it learns to copy in a third of AdamW's steps), AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [w for name, w in named if w.dim() == 2 and name.startswith("blk")]
    others = [w for name, w in named if w.dim() != 2 or not name.startswith("blk")]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def save(
    path: Path, recipe: str, step: int, seconds: float, model: Llama, optims: list[torch.optim.Optimizer]
) -> None:
    state = {
        "recipe": recipe,
        "step": step,
        "seconds": seconds,
        "shape": model.shape.to_dict(),
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optims],
    }
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def load_model(path: Path) -> tuple[str, Llama]:
    """The name of a checkpoint's recipe, and the model."""
    state = torch.load(path, weights_only=True)
    model = Llama(Shape(**state["shape"]))
    model.load_state_dict(state["model"])
    return state["recipe"], model.eval()


def keep_freed_memory() -> None:
    """Tells glibc to keep big blocks for the next step; fetching them anew costs half of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def train(name: str, out: Path, minutes: float) -> None:
    recipe = RECIPES[name]
    torch.manual_seed(recipe.seed)
    tokenizer = recipe.build_tokenizer()
    model = Llama(Shape(len(tokenizer), **recipe.shape))
    optims = optimizers(model)
    first, seconds = 0, 0.0
    if (out / CHECKPOINT).exists():
        state = torch.load(out / CHECKPOINT, weights_only=True)
        first, seconds = state["step"], state["seconds"]
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optimizers"], strict=True):
            optim.load_state_dict(saved)
    losses, rights, since = [], [], time.monotonic()
    end = since + 60 * minutes
    for step in range(first, recipe.n_steps):
        torch.manual_seed(recipe.seed + step)
        corpus = recipe.corpus(tokenizer, np.random.default_rng([recipe.seed, step]))
        stage, rate = stage_at(recipe.stages, step)
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
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == recipe.n_steps:
            save(out / CHECKPOINT, name, step + 1, seconds, model, optims)
            if time.monotonic() > end:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=RECIPES, default="passkey", help="[passkey]")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these [never]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and the curve")
    parser.add_argument("--threads", type=int, default=1, help="one is fastest for matrices this small [1]")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    train(arguments.model, arguments.out, arguments.minutes)


if __name__ == "__main__":
    main()
