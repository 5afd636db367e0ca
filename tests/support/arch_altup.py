"""What Gemma 3n has beside attention and a feed-forward. libllama knows these sizes, whatever a file says."""

from __future__ import annotations

from support.arch_random import Random, Tensors
from support.models import N_VOCAB

N_EMBD_LAYER = 256
N_STATES = 4  # AltUp's
RANK = 64  # Laurel's
N_WITH_KV = 20  # later layers read K and V of these
TAME = 0.2  # what norms let a layer add: with 1 a model of so many layers is chaotic


def altup_layer(random: Random) -> Tensors:
    n_embd = random.spec.n_embd
    return {
        "inp_gate.weight": random.matrix(N_EMBD_LAYER, n_embd),
        "proj.weight": random.matrix(n_embd, N_EMBD_LAYER),
        "post_norm.weight": TAME * random.norm(n_embd),
        "post_attention_norm.weight": TAME * random.norm(n_embd),
        "post_ffw_norm.weight": TAME * random.norm(n_embd),
        "altup_router.weight": random.matrix(
            N_STATES, n_embd, gain=n_embd
        ),  # what it sees is divided by n_embd
        "altup_router_norm.weight": random.norm(n_embd),
        "altup_predict_coef.weight": random.matrix(N_STATES**2, N_STATES, gain=TAME),
        "altup_correct_coef.weight": random.matrix(N_STATES, N_STATES, gain=TAME),
        "altup_correct_scale.weight": random.norm(n_embd),
        "laurel_l.weight": random.matrix(RANK, n_embd),
        "laurel_r.weight": random.matrix(n_embd, RANK),
        "laurel_post_norm.weight": TAME * random.norm(n_embd),
    }


def altup_frame(random: Random) -> Tensors:
    spec = random.spec
    width = N_EMBD_LAYER * spec.n_layer
    return {
        "altup_proj.weight": random.matrix(N_STATES - 1, spec.n_embd, spec.n_embd),
        "altup_unembd_proj.weight": random.matrix(N_STATES - 1, spec.n_embd, spec.n_embd),
        "per_layer_token_embd.weight": random.matrix(N_VOCAB, width, gain=2.0 * spec.n_layer**0.5),
        "per_layer_model_proj.weight": random.matrix(width, spec.n_embd),
        "per_layer_proj_norm.weight": random.norm(N_EMBD_LAYER),
    }
