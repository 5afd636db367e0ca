"""What a random model looks like: which architectures have what, and the sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from support.models import WeightType

DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
HUNYUAN = ("hunyuan-dense", "hunyuan-moe")
SHORT_CONV = ("lfm2", "lfm2moe")
# encoders whose norms come behind sums
BERTS = ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3")
ENCODERS = (*BERTS, "modern-bert", "eurobert", "neo-bert")
# a layer without KV heads has a state
NEMOTRONS = ("nemotron_h", "nemotron_h_moe")
BY_KV_HEADS = (*SHORT_CONV, "granitehybrid", *NEMOTRONS, "kimi-linear")
# every second layer has twice as many heads
VARYING = ("openelm", "laguna", "spark2_5")
# K and V of heads are made of a latent
LATENT_HEADS = ("minicpm3",)

# norms behind attention and feed-forward, alone or beside those before them; norms of Q and K, of each head
# or of all of a token's
LAYER_NORMS = (
    "command-r",
    "cohere2",
    "phi2",
    "stablelm",
    "starcoder2",
    "nemotron",
    "gptneox",
    "falcon",
    "gpt2",
    "modern-bert",
    "starcoder",
    "bloom",
    "mpt",
    "jais",
    "jais2",
    "orion",
    "codeshell",
    "olmo",
    "dbrx",
    "cohere2moe",
    *BERTS,
)
# of all matrices
OLDER_BIASES = ("starcoder", "bloom", "jais", "jais2", "codeshell")
NORM_BIASES = (
    "phi2",
    "phimoe",
    "stablelm",
    "starcoder2",
    "nemotron",
    "gptneox",
    "falcon",
    "gpt2",
    "orion",
    *OLDER_BIASES,
)
BIASES = (
    "phi2",
    "phimoe",
    "starcoder2",
    "gptneox",
    "gpt2",
    "bert",
    "jina-bert-v2",
    "jina-bert-v3",
    *OLDER_BIASES,
)
POST_NORMS = (
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma-embedding",
    "olmo2",
    "exaone4",
    "glm4",
    "muse-glimmer",
    "afmoe",
)
NO_PRE_NORMS = ("olmo2", "exaone4", "olmo", *BERTS)
HEAD_NORMS = (
    "qwen3",
    "qwen3moe",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma-embedding",
    "exaone4",
    "bailingmoe2",
    "dots1",
    *HUNYUAN,
    "apertus",
    "qwen3vl",
    "qwen3vlmoe",
    "exaone-moe",
    "muse-glimmer",
    "afmoe",
    "laguna",
    "openelm",
    "maincoder",
    "plamo3",
    "mellum",
    "hy_v3",
    *DELTA_NETS,
    *SHORT_CONV,
)
WIDE_NORMS = ("olmo2", "olmoe", "minimax-m2")
NO_FFN_NORM = (
    *NEMOTRONS,
    "falcon-h1",
    "mamba2",
    "command-r",
    "cohere2",
    "cohere2moe",
    "phi2",
    "falcon",
    "plamo",
    "dbrx",
    *NO_PRE_NORMS,
)
# gate and up are one matrix; there is no gate
GATED_IN_ONE = ("phi3", "glm4", "modern-bert", "neo-bert", "chatglm", "plamo3")
UNGATED = (
    *NEMOTRONS,
    "starcoder",
    "bloom",
    "mpt",
    "jais2",
    "codeshell",
    "arcee",
    "phi2",
    "starcoder2",
    "nemotron",
    "gptneox",
    "falcon",
    "gpt2",
    "apertus",
    "bert",
    "nomic-bert-moe",
    "jina-bert-v3",
)
TIED = (
    "gemma",
    "gemma2",
    "command-r",
    "cohere2",
    "gemma-embedding",
    "openelm",
    "bitnet",
    *ENCODERS,
)
GRANITES = ("granite", "granitemoe", "granitehybrid", "granite_swa")
SINKS = ("gpt-oss", "granite_swa", "mimo2")

# the first layer has no experts
LATENTS = ("deepseek2", "mistral4")
NO_CHOICE_BIAS = ("deepseek", "cohere2moe")
FIRST_DENSE = (
    "lfm2moe",
    "kimi-linear",
    "bailingmoe2",
    "glm4moe",
    "dots1",
    "ernie4_5-moe",
    "exaone-moe",
    "deepseek2-ocr",
    "afmoe",
    "laguna",
    "hy_v3",
    "mimo2",
    *NO_CHOICE_BIAS,
    *LATENTS,
)
CHOICE_BIAS = (
    "minimax-m2",
    "nemotron_h_moe",
    *(name for name in FIRST_DENSE if name not in NO_CHOICE_BIAS),
)
# an expert that every token goes to, as wide as so many of the others
SHARED_COUNT = (
    "kimi-linear",
    "bailingmoe2",
    "glm4moe",
    "dots1",
    "deepseek",
    "deepseek2-ocr",
    "bailingmoe",
    "afmoe",
    "cohere2moe",
    *LATENTS,
)
SCALED_EXPERTS = ("nemotron_h_moe", "exaone-moe", "laguna", "hy_v3", *SHARED_COUNT)
# their weights add up to 1, and the file says so; libllama doesn't look there for deepseek
NORMED_EXPERTS = (
    "deepseek",
    "bailingmoe",
    "glm4moe",
    "dots1",
    "nemotron_h_moe",
    "exaone-moe",
    "laguna",
    "hy_v3",
    "afmoe",
    "cohere2moe",
)
SIGMOID = (
    "lfm2moe",
    "kimi-linear",
    "bailingmoe2",
    "glm4moe",
    "dots1",
    "minimax-m2",
    "exaone-moe",
    "smallthinker",
)
# a gate behind attention that a matrix of its own makes: for all that heads give, or for each head
GATES = ("muse-glimmer", "afmoe")
HEAD_GATES = ("laguna", "spark2_5")


@dataclass(frozen=True)
class ArchSpec:
    """What a random model looks like. Zeros: without."""

    arch: str
    n_layer: int = 3
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 96
    n_expert: int = 0
    n_expert_used: int = 2
    n_group: int = 0  # of experts: two may be chosen from
    window: int = 0
    period: int = 2  # every so many layers, one attends to everything
    scaling: str = ""  # "linear", "yarn" or "longrope"
    factor: float = 4.0
    n_ctx_orig: int = 64
    n_rot: int = 0
    n_ctx_train: int = 4096
    fused: bool = False
    # Gemma 4's: heads of layers with a window, layers that read the K and V of others, and have matrices of
    # their own that nothing uses; V made of K's matrix; what each layer has of its own for each token
    head_dim_window: int = 0
    n_head_kv_window: int = 0
    n_shared: int = 0
    spare_kv: bool = False
    v_of_k: bool = False
    n_embd_layer: int = 0
    # of layers with a state: heads of V, heads of K, both of state_dim; inputs that the convolution sees
    state_heads: int = 0
    state_heads_k: int = 2
    state_dim: int = 16
    n_taps: int = 4
    n_ff_shared: int = 0
    older: bool = False  # qwen3next: one matrix makes Q, K, V and gate of a state
    # attention by a latent: its width, what lies behind it, and a head's V; what queries come by way of
    rank: int = 0
    n_behind: int = 16
    head_dim_out: int = 24
    q_rank: int = 0
    biases: bool = False
    parallel: bool = False  # the feed-forward sees what attention sees
    norms_by_head: bool = False
    two_norms: bool = False  # falcon: one for attention, one for the feed-forward; jina-bert-v2: more norms
    gates: str = "apart"  # jina-bert-v2: "apart", "in one" matrix with up, or "none"
    activation: str = ""  # modern-bert's key
    wide_gate: bool = False  # laguna: of all that heads give
    n_latent: int = 0  # of what experts see
    temperature: float = 0.0  # of later queries
    yarn_gain: float = 0.0
    sections: tuple[int, ...] = ()  # of rope's pairs, in files that also see pictures
    pooling: int = -1  # of embeddings: llama.cpp's number
    n_dense: int = 0  # between the two matrices that pooled states go through
    n_classes: int = 0  # of a reranker
    class_hidden: bool = True  # whether its classifier has a matrix before the last
    class_pooling: int = -1  # what the classifier sees: llama.cpp's number
    draft_head: bool = False  # one more layer, which guesses tokens ahead (MTP)
    draft_output: bool = False  # whether that has embeddings, a norm and an output of its own
    silent: tuple[int, ...] = ()  # layers whose attention adds nothing: later ones know no other token
    weights: WeightType = WeightType.F32
    expert_weights: WeightType | None = None
    seed: int = 0

    @property
    def n_block(self) -> int:
        """Layers and draft heads."""
        return self.n_layer + self.draft_head

    def has_window(self, layer: int) -> bool:
        return self.window > 0 and (layer + 1) % self.period > 0

    def has_state(self, layer: int) -> bool:
        """All layers but every period-th, or all beside attention; Nemotron's third kind feeds forward."""
        if layer >= self.n_layer:
            return False
        if self.arch in NEMOTRONS:
            return bool(layer % 3 == 0)
        if self.arch == "mamba2":
            return True
        return self.state_heads > 0 and (self.arch == "falcon-h1" or (layer + 1) % self.period > 0)

    def attends(self, layer: int) -> bool:
        """deci: of every three layers the second has a matrix in its place, the third only feeds forward."""
        if self.arch in NEMOTRONS:
            return layer % 3 == 1 or layer >= self.n_layer
        if self.arch == "deci":
            return layer % 3 == 0
        return self.arch == "falcon-h1" or not self.has_state(layer)

    def feeds(self, layer: int) -> bool:
        if self.arch in NEMOTRONS:
            return layer % 3 == 2 or layer >= self.n_layer
        return self.arch != "mamba2"

    def reads_another(self, layer: int) -> bool:
        """Whether it reads K and V of an earlier layer."""
        return self.n_layer - self.n_shared <= layer < self.n_layer

    def routes(self, layer: int) -> bool:
        """Whether the layer has experts in place of a dense feed-forward."""
        if self.arch == "llama4":
            return (layer + 1) % 2 == 0
        if self.arch == "nomic-bert-moe":
            return layer % 2 == 1
        return self.n_expert > 0 and self.arch != "gemma4" and (self.arch not in FIRST_DENSE or layer > 0)

    def n_head_of(self, layer: int) -> int:
        return self.n_head * (2 if self.arch in VARYING and layer % 2 else 1)

    def n_ff_of(self, layer: int) -> int:
        return self.n_ff + (32 if self.arch == "openelm" and layer % 2 else 0)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Width of the layer's heads, and how many it has of K and V."""
        if not self.has_window(layer):
            return self.head_dim, self.n_head_kv
        return self.head_dim_window or self.head_dim, self.n_head_kv_window or self.n_head_kv

    def __str__(self) -> str:
        shown = [self.arch]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                text = value.name if isinstance(value, WeightType) else value
                text = "".join(map(str, text)) if isinstance(text, tuple) else text
                shown.append(f"{field.name.removeprefix('n_').replace('_', '')}{text}")
        return "-".join(map(str, shown))
