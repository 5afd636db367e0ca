"""Models of each kind that prefixes are kept in another way for, and of rows."""

from __future__ import annotations

from support.architectures import ArchSpec
from support.recurrent import DELTA_NET

KINDS = [
    ArchSpec("llama", 2, 32, 2, 1, 16, 32),
    ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=8),
    DELTA_NET,
]
SINKS = ArchSpec("gpt-oss", 2, 64, 4, 2, 32, 32, n_expert=4, window=24)  # windows and experts too

# One of each of these whose layers attend to every position; muse-glimmer and cohere2moe have windows, too.
LATER_ROWS = [
    ArchSpec("qwen2vl", 1, head_dim=16, biases=True, sections=(2, 3, 3, 0)),
    ArchSpec("qwen3vl", 1, sections=(6, 5, 5, 0)),
    ArchSpec("qwen3vlmoe", 1, n_expert=2, sections=(6, 5, 5, 0)),
    ArchSpec("paddleocr", 1, sections=(6, 5, 5, 0)),
    ArchSpec("internlm2", 1, head_dim=16),
    ArchSpec("xverse", 1, head_dim=16),
    ArchSpec("baichuan", 32, 32, 2, 2, 16, 32, silent=tuple(range(31))),
    ArchSpec("exaone", 1),
    ArchSpec("pangu-embedded", 1, biases=True),
    ArchSpec("plamo", 1, head_dim=16),
    ArchSpec("maincoder", 1),
    ArchSpec("qwen", 1, head_dim=16, n_head_kv=4, fused=True, biases=True),
    ArchSpec("chatglm", 1, head_dim=16, n_rot=8, fused=True),
    ArchSpec("refact", 1),
    ArchSpec("minicpm", 1),
    ArchSpec("minicpm3", 1, n_head_kv=4, rank=48, q_rank=40),
    ArchSpec("bitnet", 1, head_dim=16),
    ArchSpec("openelm", 1, fused=True),
    ArchSpec("plamo3", 1, fused=True),
    ArchSpec("mellum", 1, n_expert=2),
    ArchSpec("deci", 3),
    ArchSpec("granite_swa", 2, window=8, silent=(1,)),
    ArchSpec("starcoder", 1, head_dim=16, fused=True),  # its positions stay
    ArchSpec("bloom", 1, head_dim=16, n_head_kv=4, fused=True),
    ArchSpec("jais", 1, head_dim=16, n_head_kv=4, fused=True),
    ArchSpec("mpt", 1, head_dim=16, fused=True),
    ArchSpec("jais2", 1),
    ArchSpec("orion", 1, head_dim=16),
    ArchSpec("codeshell", 1, head_dim=16),
    ArchSpec("olmo", 1, head_dim=16),
    ArchSpec("dbrx", 1, head_dim=16, fused=True, n_expert=2),
    ArchSpec("deepseek", 2, head_dim=16, n_expert=2, n_ff_shared=96, silent=(0,)),
    ArchSpec("deepseek2-ocr", 2, head_dim=16, n_head_kv=4, n_expert=2, n_ff_shared=96, silent=(0,)),
    ArchSpec("bailingmoe", 1, n_expert=2, n_ff_shared=96),
    ArchSpec("exaone-moe", 2, window=8, n_expert=2, n_ff_shared=48, silent=(1,)),
    ArchSpec("cohere2moe", 2, window=8, n_expert=2, n_ff_shared=96, silent=(0,)),
    ArchSpec("hy_v3", 2, n_expert=2, n_ff_shared=48, silent=(0,)),
    ArchSpec("arctic", 1, head_dim=16, n_expert=2),
    ArchSpec("grok", 1, head_dim=16, n_expert=2),
    ArchSpec("smallthinker", 1, n_expert=2),
    ArchSpec("mimo2", 2, window=8, n_expert=2, n_head_kv_window=4, n_rot=16, silent=(0,)),
    ArchSpec("muse-glimmer", 2, window=8, silent=(1,)),
    ArchSpec("afmoe", 2, window=8, n_expert=2, n_ff_shared=96, silent=(1,)),
    ArchSpec("laguna", 2, n_expert=2, n_ff_shared=48, silent=(0,)),
    ArchSpec("spark2_5", 2, window=8, silent=(1,)),
]

# One of each row whose layers attend to every position, and to some only in Cohere 2. Both experts are used,
# because a rounding may choose another one.
ROWS = [
    ArchSpec("gemma", 1, head_dim=16, n_head=8, n_head_kv=1),
    ArchSpec("qwen2moe", 1, head_dim=16, n_expert=2, n_ff_shared=48),
    ArchSpec("olmo2", 1, head_dim=16),
    ArchSpec("olmoe", 1, head_dim=16, n_head_kv=4, n_expert=2),
    ArchSpec("smollm3", 1),
    ArchSpec("smollm3", 4, silent=(0, 1, 2)),  # the last rotates nothing
    ArchSpec("seed_oss", 1, biases=True),
    ArchSpec("arcee", 1),
    ArchSpec("exaone4", 1, head_dim=16),
    ArchSpec("glm4", 1, n_rot=16, sections=(4, 4, 4, 0)),
    ArchSpec("granite", 1),
    ArchSpec("granitemoe", 1, n_expert=2, n_ff_shared=48),
    ArchSpec("ernie4_5", 1),
    ArchSpec("command-r", 1, head_dim=16),
    ArchSpec("cohere2", 2, head_dim=16, window=8, silent=(1,)),
    ArchSpec("phi2", 1, head_dim=16, n_rot=8),
    ArchSpec("phimoe", 1, head_dim=16, n_expert=2, scaling="longrope"),
    ArchSpec("stablelm", 1, head_dim=16, n_rot=4),
    ArchSpec("starcoder2", 1, head_dim=16),
    ArchSpec("nemotron", 1, head_dim=16, n_rot=8),
    ArchSpec("gptneox", 1, head_dim=16, n_rot=4, fused=True, parallel=True),
    ArchSpec("mistral3", 1, scaling="yarn", temperature=0.5, yarn_gain=0.7, n_ctx_orig=16),
    ArchSpec("hunyuan-dense", 1),
    ArchSpec("hunyuan-moe", 1, n_expert=2, n_ff_shared=48, scaling="yarn"),
    ArchSpec("apertus", 1),
    ArchSpec("gpt2", 1, head_dim=16, n_head_kv=4, fused=True),  # its positions stay
    ArchSpec("falcon", 1, head_dim=16, two_norms=True),
    ArchSpec("llama4", 2, n_expert=2, n_ff_shared=96, silent=(0,)),
    ArchSpec("deepseek2", 2, n_head_kv=1, n_expert=2, n_ff_shared=96, rank=48, q_rank=32, silent=(0,)),
    ArchSpec("minimax-m2", 1, n_rot=16, n_expert=2),
    ArchSpec("bailingmoe2", 2, n_rot=16, n_expert=2, n_ff_shared=96, fused=True, head_dim=16, silent=(0,)),
    ArchSpec("glm4moe", 2, n_rot=16, n_expert=2, n_ff_shared=96, biases=True, silent=(0,)),
    ArchSpec("dots1", 2, n_head_kv=4, n_expert=2, n_ff_shared=192, silent=(0,)),
    ArchSpec("ernie4_5-moe", 2, n_expert=2, n_ff_shared=48, silent=(0,)),
]
