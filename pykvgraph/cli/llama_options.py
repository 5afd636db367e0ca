"""What the options of llama-server and llama-cli are here: taken, taken without an effect, or refused.

Parsing, its messages, llama-server's environment variables and the table of docs/coming-from-llama-server.md
come from here. tests/data/llama-server-options.txt is what it must have.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

Effect = Literal["taken", "none", "refused"]


@dataclass(frozen=True)
class LlamaOption:
    """names: all spellings. n_values: of words behind it; None: one or none. variables: of the environment.

    note: why it has no effect or is refused; of one that is taken, what differs, or "".
    """

    names: tuple[str, ...]
    n_values: int | None
    variables: tuple[str, ...]
    effect: Effect
    note: str


# a line: names, a word for each value behind them ([in brackets]: it may be missing), $VARIABLES
_TAKEN = {
    "": """
        -h --help --usage
        --version
        -c --ctx-size N $LLAMA_ARG_CTX_SIZE
        -n --predict --n-predict N $LLAMA_ARG_N_PREDICT
        -ub --ubatch-size N $LLAMA_ARG_UBATCH
        --keep N
        --swa-full $LLAMA_ARG_SWA_FULL
        -dt --defrag-thold N $LLAMA_ARG_DEFRAG_THOLD
        -fa --flash-attn [on|off|auto] $LLAMA_ARG_FLASH_ATTN
        -e --escape --no-escape
        --rope-scaling TYPE $LLAMA_ARG_ROPE_SCALING_TYPE
        --rope-scale N $LLAMA_ARG_ROPE_SCALE
        --rope-freq-base N $LLAMA_ARG_ROPE_FREQ_BASE
        --rope-freq-scale N $LLAMA_ARG_ROPE_FREQ_SCALE
        --yarn-orig-ctx N $LLAMA_ARG_YARN_ORIG_CTX
        -kvo --kv-offload -nkvo --no-kv-offload $LLAMA_ARG_KV_OFFLOAD
        --rpc SERVERS $LLAMA_ARG_RPC
        -dev --device NAMES $LLAMA_ARG_DEVICE
        -ts --tensor-split N,N $LLAMA_ARG_TENSOR_SPLIT
        --override-kv KEY=TYPE:VALUE
        --lora FILES
        --lora-scaled FILE:SCALE
        -m --model FILE $LLAMA_ARG_MODEL
        -mu --model-url URL $LLAMA_ARG_MODEL_URL
        -hf -hfr --hf-repo REPO $LLAMA_ARG_HF_REPO
        -hff --hf-file FILE $LLAMA_ARG_HF_FILE
        -hft --hf-token TOKEN $HF_TOKEN
        --log-disable
        --log-file FILE $LLAMA_ARG_LOG_FILE
        --offline $LLAMA_ARG_OFFLINE
        --samplers NAMES
        -s --seed N
        --sampler-seq --sampling-seq LETTERS
        --ignore-eos
        --temp --temperature N $LLAMA_ARG_TEMPERATURE
        --top-k N $LLAMA_ARG_TOP_K
        --top-p N $LLAMA_ARG_TOP_P
        --min-p N $LLAMA_ARG_MIN_P
        --top-nsigma --top-n-sigma N
        --xtc-probability N
        --xtc-threshold N
        --typical --typical-p N
        --repeat-last-n N
        --repeat-penalty N $LLAMA_ARG_REPEAT_PENALTY
        --presence-penalty N $LLAMA_ARG_PRESENCE_PENALTY
        --frequency-penalty N $LLAMA_ARG_FREQUENCY_PENALTY
        --dry-multiplier N
        --dry-base N
        --dry-allowed-length N
        --dry-penalty-last-n N
        --dry-sequence-breaker TEXT
        --adaptive-decay N
        --dynatemp-range N
        --dynatemp-exp N
        --mirostat N
        --mirostat-lr N
        --mirostat-ent N
        -l --logit-bias TOKEN(+/-)BIAS
        --grammar GBNF
        --grammar-file FILE
        -j --json-schema SCHEMA
        -jf --json-schema-file FILE
        --spec-draft-hf -hfd -hfrd --hf-repo-draft REPO $LLAMA_ARG_SPEC_DRAFT_HF_REPO
        --spec-draft-model -md --model-draft FILE $LLAMA_ARG_SPEC_DRAFT_MODEL $LLAMA_ARG_MODEL_DRAFT
        --draft --draft-n --draft-max N $LLAMA_ARG_DRAFT_MAX
        --kv-unified-per-slot N $LLAMA_ARG_KV_UNIFIED_PER_SLOT
        -kvu --kv-unified -no-kvu --no-kv-unified $LLAMA_ARG_KV_UNIFIED
        --context-shift --no-context-shift $LLAMA_ARG_CONTEXT_SHIFT
        -r --reverse-prompt TEXT
        -sp --special
        --spm-infill
        -a --alias NAMES $LLAMA_ARG_ALIAS
        --tags NAMES $LLAMA_ARG_TAGS
        --pooling TYPE $LLAMA_ARG_POOLING
        --rerank --reranking $LLAMA_ARG_RERANKING
        --embd-normalize N
        --port N $LLAMA_ARG_PORT
        --reuse-port $LLAMA_ARG_REUSE_PORT
        --ui --webui --no-ui --no-webui $LLAMA_ARG_UI $LLAMA_ARG_WEBUI
        --api-key KEYS $LLAMA_API_KEY
        --api-key-file FILE $LLAMA_ARG_API_KEY_FILE
        --chat-template-kwargs JSON $LLAMA_ARG_CHAT_TEMPLATE_KWARGS $LLAMA_CHAT_TEMPLATE_KWARGS
        --sse-ping-interval N $LLAMA_ARG_SSE_PING_INTERVAL
        --cache-prompt --no-cache-prompt $LLAMA_ARG_CACHE_PROMPT
        --cache-reuse N $LLAMA_ARG_CACHE_REUSE
        --metrics $LLAMA_ARG_ENDPOINT_METRICS
        --props $LLAMA_ARG_ENDPOINT_PROPS
        --cors-origins ORIGINS $LLAMA_ARG_CORS_ORIGINS
        --slots --no-slots $LLAMA_ARG_ENDPOINT_SLOTS
        --slot-save-path FOLDER $LLAMA_ARG_SLOT_SAVE_PATH
        --jinja --no-jinja $LLAMA_ARG_JINJA
        --reasoning-format FORMAT $LLAMA_ARG_THINK
        -rea --reasoning [on|off|auto] $LLAMA_ARG_REASONING
        --reasoning-effort LEVEL $LLAMA_ARG_REASONING_EFFORT
        --reasoning-budget N $LLAMA_ARG_THINK_BUDGET
        --reasoning-budget-message TEXT $LLAMA_ARG_THINK_BUDGET_MESSAGE
        --chat-template JINJA $LLAMA_ARG_CHAT_TEMPLATE
        --chat-template-file FILE $LLAMA_ARG_CHAT_TEMPLATE_FILE
        --skip-chat-parsing --no-skip-chat-parsing $LLAMA_ARG_SKIP_CHAT_PARSING
        --prefill-assistant --no-prefill-assistant $LLAMA_ARG_PREFILL_ASSISTANT
    """,
    "without it, all CPUs, and one for a model under 10 million parameters": """
        -t --threads N $LLAMA_ARG_THREADS
        -tb --threads-batch N
    """,
    "512 unless it is given": "-b --batch-size N $LLAMA_ARG_BATCH",
    "iq4_nl is no type of a cache here": """
        -ctk --cache-type-k TYPE $LLAMA_ARG_CACHE_TYPE_K
        -ctv --cache-type-v TYPE $LLAMA_ARG_CACHE_TYPE_V
    """,
    "all and auto are all layers": "-ngl --gpu-layers --n-gpu-layers N $LLAMA_ARG_N_GPU_LAYERS",
    "of the native log alone: 1 errors, 2 warnings, 3 what it does, 4 and more everything": """
        -lv --verbosity --log-verbosity N $LLAMA_ARG_LOG_VERBOSITY
    """,
    "-lv 4, and `verbose` of all requests that say nothing of it": "-v --verbose --log-verbose",
    "16 unless it is given": "--spec-draft-n-max N $LLAMA_ARG_SPEC_DRAFT_N_MAX",
    "none, draft-simple, draft-mtp (by itself with a draft head or an assistant) and ngram-simple": """
        --spec-type TYPE $LLAMA_ARG_SPEC_TYPE
    """,
    "0 unless it is given: free memory is cells already": "-cram --cache-ram N $LLAMA_ARG_CACHE_RAM",
    "it works by itself, without --samplers": "--adaptive-target N",
    "scales are 0, as llama-server's README says; the program applies them": "--lora-init-without-apply",
    "auto and -1 are 4": "-np --parallel N $LLAMA_ARG_N_PARALLEL",
    "no UNIX socket": "--host HOST $LLAMA_ARG_HOST",
    "everything else is served, too": "--embedding --embeddings $LLAMA_ARG_EMBEDDINGS",
    "to read what was sent; a body has 60 seconds at most to come": "-to --timeout N $LLAMA_ARG_TIMEOUT",
    "of llama-cli: by `pykvgraph generate`": """
        -p --prompt TEXT
        -f --file FILE
    """,
    "of llama-cli: by `pykvgraph chat`": "-sys --system-prompt TEXT",
}
_NO_EFFECT = {
    "the operating system places and ranks threads: use taskset, nice or numactl": """
        -C --cpu-mask M
        -Cr --cpu-range LO-HI
        --cpu-strict 0|1
        --prio N
        -Cb --cpu-mask-batch M
        -Crb --cpu-range-batch LO-HI
        --cpu-strict-batch 0|1
        --prio-batch N
        --numa TYPE $LLAMA_ARG_NUMA
    """,
    "threads wait as OpenMP lets them: GOMP_SPINCOUNT and OMP_WAIT_POLICY": """
        --poll 0...100
        --poll-batch 0|1
    """,
    "timings are always measured": "--perf --no-perf $LLAMA_ARG_PERF",
    "ggml chooses the buffers of weights": """
        --repack -nr --no-repack $LLAMA_ARG_REPACK
        --no-host $LLAMA_ARG_NO_HOST
    """,
    "weights are read into the memory of their device": """
        -lm --load-mode MODE $LLAMA_ARG_LOAD_MODE
        -lzm --lazy-mode MODE $LLAMA_ARG_LAZY_MODE
        --mlock $LLAMA_ARG_MLOCK
        --mmap --no-mmap $LLAMA_ARG_MMAP
        -dio --direct-io -ndio --no-direct-io $LLAMA_ARG_DIO
    """,
    "layers go to devices whole: -dev, -ngl and -ts say which": """
        -ot --override-tensor PATTERN=BUFFER $LLAMA_ARG_OVERRIDE_TENSOR
        -cmoe --cpu-moe $LLAMA_ARG_CPU_MOE
        -ncmoe --n-cpu-moe N $LLAMA_ARG_N_CPU_MOE
        --moe-cache-mib N $LLAMA_ARG_MOE_CACHE_MIB
        -ncffn --n-cpu-ffn N $LLAMA_ARG_N_CPU_FFN
        -sm --split-mode MODE $LLAMA_ARG_SPLIT_MODE
        -mg --main-gpu INDEX $LLAMA_ARG_MAIN_GPU
        --op-offload --no-op-offload
    """,
    "-c auto takes as many cells as the memory has room for, and leaves --margin per cent of it": """
        -fit --fit [on|off] $LLAMA_ARG_FIT
        -fitt --fit-target MiB,MiB $LLAMA_ARG_FIT_TARGET
        -fitc --fit-ctx N $LLAMA_ARG_FIT_CTX
    """,
    "sizes and offsets of a file are always checked, weights never": "--check-tensors",
    "a line of the log is its message alone, without colours": """
        --log-jsonl --no-log-jsonl $LLAMA_ARG_LOG_JSONL
        --log-colors [on|off|auto] $LLAMA_ARG_LOG_COLORS
        --log-prefix --no-log-prefix $LLAMA_ARG_LOG_PREFIX
        --log-timestamps --no-log-timestamps $LLAMA_ARG_LOG_TIMESTAMPS
        --verbose-prompt
        -dkvc --dump-kv-cache
    """,
    "prompts are not written down": "--log-prompts-dir FOLDER",
    "samplers run on the CPU, and say the same": """
        -bs --backend-sampling $LLAMA_ARG_BACKEND_SAMPLING
        --spec-draft-backend-sampling --no-spec-draft-backend-sampling $LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING
    """,
    "the draft model runs as the model does: the same devices, threads and context": """
        --spec-draft-type-k -ctkd --cache-type-k-draft TYPE $LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K
        --spec-draft-type-v -ctvd --cache-type-v-draft TYPE $LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V
        --spec-draft-threads -td --threads-draft N
        --spec-draft-threads-batch -tbd --threads-batch-draft N
        --spec-draft-cpu-mask -Cd --cpu-mask-draft M
        --spec-draft-cpu-range -Crd --cpu-range-draft LO-HI
        --spec-draft-cpu-strict --cpu-strict-draft 0|1
        --spec-draft-prio --prio-draft N
        --spec-draft-poll --poll-draft 0|1
        --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft M
        --spec-draft-cpu-strict-batch --cpu-strict-batch-draft 0|1
        --spec-draft-prio-batch --prio-batch-draft N
        --spec-draft-poll-batch --poll-batch-draft 0|1
        --spec-draft-override-tensor -otd --override-tensor-draft PATTERN=BUFFER
        --spec-draft-cpu-moe -cmoed --cpu-moe-draft $LLAMA_ARG_SPEC_DRAFT_CPU_MOE
        --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft N $LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE
        --spec-draft-device -devd --device-draft NAMES
        --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft N $LLAMA_ARG_N_GPU_LAYERS_DRAFT
        -cd --ctx-size-draft N $LLAMA_ARG_CTX_SIZE_DRAFT
    """,
    "how long a draft is depends on how many of its tokens hold, and it ends where it doesn't pay": """
        --spec-draft-n-min N $LLAMA_ARG_SPEC_DRAFT_N_MIN
        --draft-min --draft-n-min N $LLAMA_ARG_DRAFT_MIN
        --spec-draft-p-split --draft-p-split P $LLAMA_ARG_SPEC_DRAFT_P_SPLIT
        --spec-draft-p-min --draft-p-min P $LLAMA_ARG_SPEC_DRAFT_P_MIN $LLAMA_ARG_DRAFT_P_MIN
        --spec-draft-sampling MODE $LLAMA_ARG_SPEC_DRAFT_SAMPLING
        --spec-ngram-mod-n-min N
        --spec-ngram-mod-n-max N
        --spec-ngram-mod-n-match N
        --spec-ngram-simple-size-n N
        --spec-ngram-simple-size-m N
        --spec-ngram-simple-min-hits N
        --spec-ngram-map-k-size-n N
        --spec-ngram-map-k-size-m N
        --spec-ngram-map-k-min-hits N
        --spec-ngram-map-k4v-size-n N
        --spec-ngram-map-k4v-size-m N
        --spec-ngram-map-k4v-min-hits N
        --spec-ngram-size-n N
        --spec-ngram-size-m N
        --spec-ngram-min-hits N
    """,
    "--spec-type ngram-simple finds drafts in the text itself": """
        --spec-default
        -lcs --lookup-cache-static FILE
        -lcd --lookup-cache-dynamic FILE
    """,
    "the engine sets as many checkpoints as the memory has room for": """
        -ctxcp --ctx-checkpoints --swa-checkpoints N $LLAMA_ARG_CTX_CHECKPOINTS $LLAMA_ARG_SWA_CHECKPOINTS
        -cms --checkpoint-min-step N $LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT
    """,
    "cells of texts that have ended stay until others need them": """
        --cache-idle-slots --no-cache-idle-slots $LLAMA_ARG_CACHE_IDLE_SLOTS
    """,
    "there is no empty run": "--warmup --no-warmup",
    "requests are always decoded together": """
        -cb --cont-batching -nocb --no-cont-batching $LLAMA_ARG_CONT_BATCHING
    """,
    "only text is taken": """
        --mmproj-auto --no-mmproj --no-mmproj-auto $LLAMA_ARG_MMPROJ_AUTO
        --mmproj-offload --no-mmproj-offload $LLAMA_ARG_MMPROJ_OFFLOAD
        -mmdev --mmproj-device NAME $MTMD_BACKEND_DEVICE
        --image-min-tokens N $LLAMA_ARG_IMAGE_MIN_TOKENS
        --image-max-tokens N $LLAMA_ARG_IMAGE_MAX_TOKENS
        --mtmd-batch-max-tokens N $LLAMA_ARG_MTMD_BATCH_MAX_TOKENS
        --video-fps N $LLAMA_ARG_VIDEO_FPS
        --video-timestamp-interval N $LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL
        --video-ffmpeg-dir FOLDER $LLAMA_ARG_VIDEO_FFMPEG_DIR
        --media-path FOLDER
    """,
    "the page here has no such settings": """
        --ui-config --webui-config JSON $LLAMA_ARG_UI_CONFIG
        --ui-config-file --webui-config-file FILE $LLAMA_ARG_UI_CONFIG_FILE
    """,
    "the server runs no tools": "--no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent",
    "one thread reads and answers all connections": "--threads-http N $LLAMA_ARG_THREADS_HTTP",
    "a server has one model": """
        --models-max N $LLAMA_ARG_MODELS_MAX
        --models-autoload --no-models-autoload $LLAMA_ARG_MODELS_AUTOLOAD
    """,
    "the chat template gets all thoughts that messages bring": """
        --reasoning-preserve --no-reasoning-preserve $LLAMA_ARG_REASONING_PRESERVE
    """,
    "slots have no cells of their own: whatever begins alike is shared": "-sps --slot-prompt-similarity N",
    "the model stays loaded": "--sleep-idle-seconds N",
    "terminals and pipes are told apart": """
        --simple-io
        -co --color [on|off|auto]
        --display-prompt --no-display-prompt
        --show-timings --no-show-timings $LLAMA_ARG_SHOW_TIMINGS
        -mli --multiline-input
        -ptc --print-token-count N
    """,
}
_REFUSED = {
    "models that were downloaded lie in the cache of huggingface_hub, which lists them: `hf cache ls`": """
        -cl --cache-list
    """,
    "`_PYKVGRAPH_COMPLETE=bash_source pykvgraph` prints that script": "--completion-bash",
    "`pykvgraph info` lists the devices": "--list-devices",
    "YaRN's other numbers are those of the model file": """
        --yarn-ext-factor N $LLAMA_ARG_YARN_EXT_FACTOR
        --yarn-attn-factor N $LLAMA_ARG_YARN_ATTN_FACTOR
        --yarn-beta-slow N $LLAMA_ARG_YARN_BETA_SLOW
        --yarn-beta-fast N $LLAMA_ARG_YARN_BETA_FAST
    """,
    "there are no control vectors here; a LoRA adapter may do": """
        --control-vector FILE
        --control-vector-scaled FILE:SCALE
        --control-vector-layer-range START END
    """,
    "models come from a file (-m), from Hugging Face (-hf) or from an address (-mu)": """
        -dr --docker-repo NAME $LLAMA_ARG_DOCKER_REPO
        --embd-gemma-default
        --fim-qwen-1.5b-default
        --fim-qwen-3b-default
        --fim-qwen-7b-default
        --fim-qwen-7b-spec
        --fim-qwen-14b-spec
        --fim-qwen-30b-default
        --gpt-oss-20b-default
        --gpt-oss-120b-default
        --vision-gemma-4b-default
        --vision-gemma-12b-default
        --embd-bge-small-en-default
        --embd-e5-small-en-default
        --embd-gte-small-default
    """,
    "drafts are never made up": """
        --spec-synth-len N $LLAMA_ARG_SPEC_SYNTH_LEN
        --spec-synth-rates P,P $LLAMA_ARG_SPEC_SYNTH_RATES
    """,
    "a draft model must have the model's vocabulary": "--spec-replace TARGET DRAFT",
    "only text is taken: no pictures, no sound": """
        -mm --mmproj FILE $LLAMA_ARG_MMPROJ
        -mmu --mmproj-url URL $LLAMA_ARG_MMPROJ_URL
        -mv --model-vocoder FILE
        --tts-use-guide-tokens
        --image --audio --video FILE
    """,
    "this server serves no files but its page; a proxy in front can (docs/serve-recipes.md)": """
        --path FOLDER $LLAMA_ARG_STATIC_PATH
        --api-prefix PREFIX $LLAMA_ARG_API_PREFIX
    """,
    "--cors-origins says whose pages may ask; a proxy in front can set other headers": """
        --cors-methods METHODS $LLAMA_ARG_CORS_METHODS
        --cors-headers HEADERS $LLAMA_ARG_CORS_HEADERS
        --cors-credentials --no-cors-credentials $LLAMA_ARG_CORS_CREDENTIALS
    """,
    "this server speaks HTTP; a proxy in front speaks TLS (docs/serve-recipes.md)": """
        --ssl-key-file FILE $LLAMA_ARG_SSL_KEY_FILE
        --ssl-cert-file FILE $LLAMA_ARG_SSL_CERT_FILE
    """,
    "the server runs no tools; clients do": """
        --ui-mcp-proxy --webui-mcp-proxy $LLAMA_ARG_UI_MCP_PROXY
        --tools NAMES $LLAMA_ARG_TOOLS
        --tools-runtime NAME $LLAMA_ARG_TOOLS_RUNTIME
        --mcp-servers-config FILE $LLAMA_ARG_MCP_SERVERS_CONFIG
        --mcp-servers-json JSON $LLAMA_ARG_MCP_SERVERS_JSON
        -ag --agent $LLAMA_ARG_AGENT
    """,
    "a server has one model: name it with -m, -hf or -mu": """
        --models-dir FOLDER $LLAMA_ARG_MODELS_DIR
        --models-preset FILE $LLAMA_ARG_MODELS_PRESET
    """,
    "`pykvgraph chat` talks, and `pykvgraph generate` goes on with a prompt": """
        -cnv --conversation -no-cnv --no-conversation
        -st --single-turn
        -i --interactive
        -if --interactive-first
        --in-prefix-bos
        --in-prefix TEXT
        --in-suffix TEXT
    """,
    '`pykvgraph chat` takes the text itself: --system "$(cat FILE)"; clients of `serve` send it': """
        -sysf --system-prompt-file FILE
    """,
    "`pykvgraph serve` keeps prompts, with --cache-ram and --cache-disk": """
        --prompt-cache FILE
        --prompt-cache-all
        --prompt-cache-ro
    """,
    "a prompt is text: -f FILE": "-bf --binary-file FILE",
    "`--self-extend` of `pykvgraph chat` groups positions": """
        -gan --grp-attn-n N $LLAMA_ARG_GRP_ATTN_N
        -gaw --grp-attn-w N $LLAMA_ARG_GRP_ATTN_W
    """,
}
# what a verb does anyway
_DONE_BY_VERBS = {
    "chat": {"this verb is a conversation": "-cnv --conversation -i --interactive -if --interactive-first"},
    "generate": {"this verb goes on with a prompt, once": "-no-cnv --no-conversation -st --single-turn"},
}
# what another reason says for a verb
_REFUSED_BY_VERBS = {
    "chat": {
        "for one answer, send one message through a pipe: echo Hello | pykvgraph chat": "-st --single-turn"
    },
}


@functools.cache
def llama_options(verb: str = "serve") -> tuple[LlamaOption, ...]:
    """All of them, as a verb has them."""
    groups: list[tuple[Effect, dict[str, str]]] = [
        ("none", _DONE_BY_VERBS.get(verb, {})),
        ("refused", _REFUSED_BY_VERBS.get(verb, {})),
        ("taken", _TAKEN),
        ("none", _NO_EFFECT),
        ("refused", _REFUSED),
    ]
    found: dict[str, LlamaOption] = {}
    for effect, notes in groups:
        for note, lines in notes.items():
            for line in filter(str.strip, lines.splitlines()):
                option = _read(line.split(), effect, note, known=found)
                found |= dict.fromkeys(option.names, option)
    return tuple(dict.fromkeys(found.values()))


def _read(words: list[str], effect: Effect, note: str, known: dict[str, LlamaOption]) -> LlamaOption:
    """An option, without names that one before it has."""
    values = [word for word in words if word[0] not in "-$"]
    return LlamaOption(
        names=tuple(word for word in words if word[0] == "-" and word not in known),
        n_values=None if values and values[0][0] == "[" else len(values),
        variables=tuple(word[1:] for word in words if word[0] == "$"),
        effect=effect,
        note=note,
    )
