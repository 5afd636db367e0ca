"""Trains a draft head for a small llama: `python training/draft_head.py MODEL.gguf OUT.gguf`.

The model's own weights stay as they are. The head is a layer behind them (docs/glossary.md) that learns from
texts that the model itself has written which token comes after the next one. OUT is of architecture glm4moe,
the plainest one with a draft head that llama.cpp runs: dense layers, and a head with experts.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

N_EXPERT = 2  # all are used for each token
N_FF = 160  # of an expert, and of the one that every token goes to
LENGTH = 160  # tokens of a text
N_STEPS = 2  # tokens that a draft is trained for: the later ones begin with the head's own states
EOS = 2
LAYER = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)


class Weights:
    """Of the llama, with queries and K in the order of glm4moe's rope: halves in place of pairs."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.n_head, self.n_head_kv = (
            self.number("attention.head_count"),
            self.number("attention.head_count_kv"),
        )
        self.n_layer, self.n_embd = self.number("block_count"), self.number("embedding_length")
        self.head_dim = self.n_embd // self.n_head
        self.eps = float(self.fields["llama.attention.layer_norm_rms_epsilon"])
        self.tensors = {t.name: np.array(t.data, np.float32) for t in reader.tensors}
        for name, weight in self.tensors.items():
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                by_head = weight.reshape(-1, self.head_dim // 2, 2, self.n_embd)
                self.tensors[name] = by_head.transpose(0, 2, 1, 3).reshape(weight.shape)

    def number(self, key: str) -> int:
        return int(self.fields[f"llama.{key}"])

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.tensors[name])


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x (batch, heads, tokens, head_dim), rotated by halves."""
    n = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-torch.arange(n) / n)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :n], x[..., n:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(-2, -3)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


Past = list[tuple[Tensor, Tensor]]  # K and V of each layer


def trunk(of: Weights, tokens: Tensor, past: Past | None = None) -> tuple[Tensor, Tensor]:
    """Hidden states behind the final norm, and logits. past: of tokens before these; gets these, too."""
    n_past = past[0][0].shape[2] if past else 0
    positions = torch.arange(n_past, n_past + tokens.shape[1])
    x = of["token_embd.weight"][tokens]
    for layer in range(of.n_layer):
        w = {name: of[f"blk.{layer}.{name}.weight"] for name in LAYER}
        seen = rms(x, w["attn_norm"], of.eps)
        q = turned(heads(seen @ w["attn_q"].T, of.n_head), positions)
        k = turned(heads(seen @ w["attn_k"].T, of.n_head_kv), positions)
        v = heads(seen @ w["attn_v"].T, of.n_head_kv)
        if past is not None and n_past:
            k, v = (torch.cat([old, new], 2) for old, new in zip(past[layer], (k, v), strict=True))
            past[layer] = k, v
        elif past is not None:
            past.append((k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not n_past, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(-2) @ w["attn_output"].T
        seen = rms(x, w["ffn_norm"], of.eps)
        x = x + (F.silu(seen @ w["ffn_gate"].T) * (seen @ w["ffn_up"].T)) @ w["ffn_down"].T
    states = rms(x, of["output_norm.weight"], of.eps)
    return states, states @ of["output.weight"].T


class Head(nn.Module):
    """A draft head with the model's embeddings, norm and output."""

    def __init__(self, of: Weights) -> None:
        super().__init__()
        self.of = of
        n, n_kv = of.n_embd, of.n_head_kv * of.head_dim
        self.enorm, self.hnorm = nn.Parameter(torch.ones(n)), nn.Parameter(torch.ones(n))
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(n)), nn.Parameter(torch.ones(n))
        self.head_norm = nn.Parameter(of["output_norm.weight"].clone())
        self.eh_proj = nn.Linear(2 * n, n, bias=False)
        self.q, self.o = nn.Linear(n, n, bias=False), nn.Linear(n, n, bias=False)
        self.k, self.v = nn.Linear(n, n_kv, bias=False), nn.Linear(n, n_kv, bias=False)
        self.router = nn.Linear(n, N_EXPERT, bias=False)
        self.gate, self.up = (nn.Linear(n, (N_EXPERT + 1) * N_FF, bias=False) for _ in range(2))
        self.down = nn.Linear((N_EXPERT + 1) * N_FF, n, bias=False)
        with torch.no_grad():
            self.o.weight.mul_(0.3)
            self.down.weight.mul_(0.3)
            self.eh_proj.weight[:, n:] += torch.eye(n)

    def forward(
        self, tokens: Tensor, before: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """(states, logits) behind each token, for the state before it.

        earlier: K and V of the drafts' steps so far, those of the model's own states first; gets this step's.
        A draft's step sees its own K and V, those of the steps before it one token back each, and behind
        these only the first ones.
        """
        of = self.of
        x = torch.cat(
            [rms(of["token_embd.weight"][tokens], self.enorm, of.eps), rms(before, self.hnorm, of.eps)], -1
        )
        x = self.eh_proj(x)
        seen = rms(x, self.attn_norm, of.eps)
        positions = torch.arange(tokens.shape[1])
        q = turned(heads(self.q(seen), of.n_head), positions)
        k, v = turned(heads(self.k(seen), of.n_head_kv), positions), heads(self.v(seen), of.n_head_kv)
        folds = of.n_head // of.n_head_kv
        earlier.append((k.repeat_interleave(folds, 1), v.repeat_interleave(folds, 1)))
        x = x + self.o(self._attend(q, earlier).transpose(1, 2).flatten(-2))
        seen = rms(x, self.ffn_norm, of.eps)
        hidden = F.silu(self.gate(seen)) * self.up(seen)
        weights = torch.sigmoid(self.router(seen))
        weights = torch.cat([weights / weights.sum(-1, keepdim=True), torch.ones_like(weights[..., :1])], -1)
        x = x + self.down((hidden.unflatten(-1, (N_EXPERT + 1, N_FF)) * weights[..., None]).flatten(-2))
        states = rms(x, self.head_norm, of.eps)
        return states, states @ of["output.weight"].T

    def _attend(self, q: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        n, scale, n_later = q.shape[2], 1 / math.sqrt(q.shape[3]), len(earlier) - 1
        (k, v), later = earlier[0], earlier[:0:-1]
        scores = q @ k.transpose(-1, -2) * scale
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1 - n_later)
        scores = scores.masked_fill(hidden, -math.inf)
        columns, values = [], []
        for back, (own_k, own_v) in enumerate(later):  # the newest step's lie at the token itself
            shifted_k, shifted_v = (torch.roll(each, back, 2) for each in (own_k, own_v))
            column = (q * shifted_k).sum(-1, keepdim=True) * scale
            absent = torch.arange(n)[:, None] < back
            columns.append(column.masked_fill(absent, -math.inf))
            values.append(shifted_v)
        share = torch.softmax(torch.cat([scores, *columns], -1), -1)
        out = share[..., :n] @ v
        for i, value in enumerate(values):
            out = out + share[..., n + i : n + i + 1] * value
        return out


def before(states: Tensor) -> Tensor:
    """The state before each token; zeros before the first one."""
    return torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)


def divergence(mine: Tensor, theirs: Tensor) -> Tensor:
    """Of likelihoods by logits, the mean of all tokens."""
    mine, theirs = (each.log_softmax(-1).flatten(0, 1) for each in (mine, theirs))
    return F.kl_div(mine, theirs, log_target=True, reduction="batchmean")


def same(mine: Tensor, theirs: Tensor) -> float:
    """In which share of cases both have the same likeliest token."""
    return float((mine.argmax(-1) == theirs.argmax(-1)).float().mean())


def losses(head: Head, tokens: Tensor, states: Tensor, logits: Tensor) -> tuple[Tensor, list[float]]:
    """The loss, and how often each token of a draft is the model's likeliest one.

    states, logits: the model's, as trunk() gives them.
    """
    earlier: list[tuple[Tensor, Tensor]] = []
    total, held = torch.zeros(()), []
    for step in range(N_STEPS):
        states, guessed = head(tokens, before(states), earlier)
        mine, theirs = guessed[:, step + 1 :], logits[:, step + 1 :]
        total = total + divergence(mine, theirs) * (1.0, 0.5)[step]
        held.append(same(mine, theirs))
    return total, held


def texts(of: Weights, n: int) -> Tensor:
    """n texts that the model writes, at temperatures of 0.2 to 1."""
    temperatures = torch.linspace(0.2, 1.0, n)[:, None]
    found, past = [torch.ones(n, 1, dtype=torch.long)], Past()
    for _ in range(LENGTH - 1):
        _, logits = trunk(of, found[-1], past)
        logits[:, -1, EOS] = -math.inf
        found.append(torch.multinomial(torch.softmax(logits[:, -1] / temperatures, -1), 1))
    return torch.cat(found, 1)


def train(head: Head, data: Tensor, minutes: float, batch: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.01)
    held_out, rest = data[:32], data[32:]
    begin = time.process_time()
    step = 0
    while (share := (time.process_time() - begin) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * share))
        chosen = rest[torch.randint(len(rest), (batch,))]
        with torch.no_grad():
            said = trunk(head.of, chosen)
        loss, _ = losses(head, chosen, *said)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            with torch.no_grad():
                loss, held = losses(head, held_out, *trunk(head.of, held_out))
            shares = [round(share, 3) for share in held]
            print(f"{step} {time.process_time() - begin:.0f} s, loss {loss:.3f}, held {shares}", flush=True)
        step += 1


def write(of: Weights, head: Head, path: Path, name: str = "stories260K with a draft head") -> None:
    """The head's matrices in F16, all else in F32."""
    writer = gguf.GGUFWriter(path, "glm4moe")
    n = of.n_layer
    writer.add_name(name)
    writer.add_license("MIT")
    writer.add_context_length(of.number("context_length"))
    writer.add_embedding_length(of.n_embd)
    writer.add_block_count(n + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(of.number("feed_forward_length"))
    writer.add_head_count(of.n_head)
    writer.add_head_count_kv(of.n_head_kv)
    writer.add_key_length(of.head_dim)
    writer.add_value_length(of.head_dim)
    writer.add_layer_norm_rms_eps(of.eps)
    writer.add_rope_dimension_count(of.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(of.number("vocab_size"))
    writer.add_leading_dense_block_count(n)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_tokenizer_model(of.fields["tokenizer.ggml.model"])
    writer.add_token_list(of.fields["tokenizer.ggml.tokens"])
    writer.add_token_scores(of.fields["tokenizer.ggml.scores"])
    writer.add_token_types(of.fields["tokenizer.ggml.token_type"])
    for end in ("bos", "eos"):
        getattr(writer, f"add_{end}_token_id")(of.fields[f"tokenizer.ggml.{end}_token_id"])
    writer.add_unk_token_id(of.fields["tokenizer.ggml.unknown_token_id"])
    for tensor, weight in of.tensors.items():
        writer.add_tensor(tensor.replace("ffn_norm", "post_attention_norm"), weight)
    for tensor, weight in of_head(head).items():
        writer.add_tensor(f"blk.{n}.{tensor}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_head(head: Head) -> dict[str, np.ndarray]:
    def matrix(weight: Tensor) -> np.ndarray:
        return weight.detach().numpy().astype(np.float16)

    gates, ups = (each.weight.unflatten(0, (N_EXPERT + 1, N_FF)) for each in (head.gate, head.up))
    downs = head.down.weight.unflatten(1, (N_EXPERT + 1, N_FF)).transpose(0, 1)
    parts = {
        "nextn.eh_proj.weight": matrix(head.eh_proj.weight),
        "attn_q.weight": matrix(head.q.weight),
        "attn_k.weight": matrix(head.k.weight),
        "attn_v.weight": matrix(head.v.weight),
        "attn_output.weight": matrix(head.o.weight),
        "ffn_gate_inp.weight": head.router.weight.detach().numpy(),
        "exp_probs_b.bias": np.zeros(N_EXPERT, np.float32),
    }
    for name, all_experts in (("gate", gates), ("up", ups), ("down", downs)):
        parts[f"ffn_{name}_exps.weight"] = np.ascontiguousarray(matrix(all_experts[:N_EXPERT]))
        parts[f"ffn_{name}_shexp.weight"] = np.ascontiguousarray(matrix(all_experts[N_EXPERT]))
    vectors = {
        "nextn.enorm": head.enorm,
        "nextn.hnorm": head.hnorm,
        "nextn.shared_head_norm": head.head_norm,
        "attn_norm": head.attn_norm,
        "post_attention_norm": head.ffn_norm,
    }
    return parts | {f"{name}.weight": vector.detach().numpy() for name, vector in vectors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=1000, help="that the model writes to learn from [1000]")
    parser.add_argument("--minutes", type=float, default=4, help="of processor time [4]")
    parser.add_argument("--batch", type=int, default=8, help="texts in a step [8]")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate [3e-3]")
    parser.add_argument("--threads", type=int, default=1, help="[1]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(20261127)
    of = Weights(arguments.model)
    with torch.no_grad():
        data = texts(of, arguments.texts)
    data = data[torch.randperm(len(data))]
    print(f"{tuple(data.shape)} tokens", flush=True)
    head = Head(of)
    train(head, data, arguments.minutes, arguments.batch, arguments.rate)
    write(of, head, arguments.out)


if __name__ == "__main__":
    main()
