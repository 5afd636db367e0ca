"""Opens damaged models, each in a process of its own, which a process that has everything imported forks.

    python -m support.hostile FOLDER BASE FIRST COUNT [BASE FIRST COUNT ...]

writes mutants FIRST to FIRST + COUNT - 1 of BASE into FOLDER, and prints one JSON object each: `mutant`,
`changes`, `verdict`. The verdict is what became of file, tokenizer and model ("ok", or the name of a typed
error), or begins with "!": a signal, an abort, another exception. Files with such a verdict stay in FOLDER.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pykvgraph as kvg
from pykvgraph.model.tokenizer import LoadedVocabulary, Tokenizer
from pykvgraph.sampling.sampler import Sampler
from support import sanitizer
from support.adapters import write_adapter
from support.architectures import ArchSpec, write_architecture
from support.assistants import write_assistant
from support.gguf_bytes import STRING
from support.gguf_parts import Parts, take_apart
from support.models import N_VOCAB, TINY, ModelSpec, WeightType, write_model
from support.mutations import write_mutant, write_resplit, write_retyped
from support.vocabularies import of_kind, write_remapped

STORIES = Path(__file__).parent.parent / "data" / "stories260K.gguf"
TEXTS = [
    "",
    " ",
    "a",
    "Once upon a time",
    "  two  blanks\n\n",
    "é",
    "é 🦊\0 中文 1234",
    "<s></s><|end|><unk>",
    "\u2581x" * 40,
]

Q8_0 = ModelSpec(n_layer=1, n_embd=32, n_ff=64, weights=WeightType.Q8_0, tied=True)
WIDE = ModelSpec(n_layer=1, n_embd=256, n_ff=256)

# For one file, on a busy machine with a sanitizer: what takes longer hangs.
SECONDS = 60
# Address space that a file of some KB may make the process ask for, on top of what it has.
BYTES = 4 << 30


def byte_level(parts: Parts) -> Parts:
    """The same model with a vocabulary as GPT-2 has it: a character for each byte, and merges."""
    alphabet = byte_alphabet()
    merged = ["aa", "th", "he", "the", "\u0120a", "\u0120\u0120", "in", "er"]
    control = [f"<|{index}|>" for index in range(N_VOCAB - len(alphabet) - len(merged) - 2)] + [
        "<|end|>",
        "<|user|>",
    ]
    tokens: list[str] = [*alphabet, *merged, *control]
    types = [1] * (len(alphabet) + len(merged)) + [3] * (len(control) - 1) + [4]
    parts.keys = [key for key in parts.keys if not key.name.startswith(b"tokenizer.")]
    parts.set("tokenizer.ggml.model", STRING, b"gpt2")
    parts.set("tokenizer.ggml.pre", STRING, b"gpt-2")
    parts.set("tokenizer.ggml.tokens", STRING, [token.encode() for token in tokens])
    parts.set("tokenizer.ggml.token_type", 5, [*types])
    merges = ["a a", "t h", "h e", "th e", "\u0120 a", "\u0120 \u0120", "i n", "e r"]
    parts.set("tokenizer.ggml.merges", STRING, [merge.encode() for merge in merges])
    parts.set("tokenizer.ggml.bos_token_id", 4, N_VOCAB - 2)
    parts.set("tokenizer.ggml.eos_token_id", 4, N_VOCAB - 2)
    return parts


def merged(kind: bytes) -> Parts:
    """The same model with a vocabulary of another kind that has merges; Gemma 4's is of plain characters."""
    if kind != b"gemma4":
        parts = byte_level(generated(TINY))
    else:
        parts = generated(TINY)
        merges = ["t h", "h e", "\u2581 t", "\n \n"]
        parts.set("tokenizer.ggml.merges", STRING, [merge.encode() for merge in merges])
    parts.set("tokenizer.ggml.model", STRING, kind)
    return parts


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: itself where that can be printed, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256)]


def generated(spec: ModelSpec) -> Parts:
    with tempfile.TemporaryDirectory() as directory:
        return take_apart(write_model(spec, Path(directory)).read_bytes())


# small files of the other architectures
ARCHITECTURES = {
    "mixtral": ArchSpec("llama", 2, 32, 2, 1, 16, 32, n_expert=4, scaling="longrope"),
    "qwen2": ArchSpec("qwen2", 2, 32, 2, 1, 16, 32, scaling="yarn"),
    "qwen3moe": ArchSpec("qwen3moe", 2, 32, 2, 1, 16, 32, n_expert=4),
    "phi3": ArchSpec("phi3", 2, 32, 2, 1, 16, 32, fused=True, biases=True, n_rot=12, scaling="longrope"),
    "gemma2": ArchSpec("gemma2", 2, 32, 2, 1, 16, 32, window=8),
    "gemma3": ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=8),
    "gemma4": ArchSpec(
        "gemma4", 4, 32, 2, 1, 16, 32, n_expert=4, window=8, head_dim_window=32, n_shared=2, n_embd_layer=8
    ),
    "gemma3n": ArchSpec("gemma3n", 3, 32, 2, 1, 16, 32, window=8),
    "gpt-oss": ArchSpec("gpt-oss", 2, 32, 2, 1, 16, 32, n_expert=4, window=8, scaling="yarn"),
    "stablelm": ArchSpec("stablelm", 2, 32, 2, 1, 16, 32, n_rot=4, norms_by_head=True),
    "cohere2": ArchSpec("cohere2", 4, 32, 2, 1, 16, 32, window=8, period=4),
    "gpt2": ArchSpec("gpt2", 2, 32, 2, 2, 16, 32, fused=True, n_ctx_train=64),
    "apertus": ArchSpec("apertus", 2, 32, 2, 1, 16, 32),
    "mistral3": ArchSpec("mistral3", 2, 32, 2, 1, 16, 32, scaling="yarn", temperature=0.5, yarn_gain=0.7),
    "hunyuan-dense": ArchSpec("hunyuan-dense", 2, 32, 2, 1, 16, 32),
    "deepseek2": ArchSpec(
        "deepseek2", 2, 32, 2, 1, 32, 32, n_expert=4, n_ff_shared=32, rank=32, q_rank=16, scaling="yarn"
    ),
    "llama4": ArchSpec("llama4", 4, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=32),
    "bailingmoe2": ArchSpec("bailingmoe2", 2, 32, 2, 1, 16, 32, n_expert=8, n_group=4, n_ff_shared=32),
    "bert": ArchSpec("bert", 2, 32, 2, 2, 16, 32, n_ctx_train=64),
    "nomic-bert-moe": ArchSpec("nomic-bert-moe", 2, 32, 2, 2, 16, 32, n_expert=4, fused=True),
    "jina-bert-v2": ArchSpec("jina-bert-v2", 2, 32, 2, 2, 16, 32, gates="in one", n_classes=1),
    "modern-bert": ArchSpec("modern-bert", 3, 32, 2, 2, 16, 32, window=8, period=3, fused=True, n_classes=2),
    "reranker": ArchSpec("bert", 2, 32, 2, 2, 16, 32, n_ctx_train=64, pooling=4, n_classes=1),
    "qwen3-reranker": ArchSpec("qwen3", 2, 32, 2, 1, 16, 32, pooling=4, n_classes=2),
    "gemma-embedding": ArchSpec("gemma-embedding", 3, 32, 2, 1, 16, 32, window=8, n_dense=24),
    "qwen35moe": ArchSpec("qwen35moe", 2, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=16, state_heads=2),
    "lfm2": ArchSpec("lfm2", 3, 32, 2, 1, 16, 32, window=8, state_heads=1, n_taps=3),
    "granitehybrid": ArchSpec("granitehybrid", 2, 32, 2, 1, 16, 32, state_heads=2),
    "nemotron_h": ArchSpec("nemotron_h", 3, 32, 2, 1, 16, 32, state_heads=2),
    "falcon-h1": ArchSpec("falcon-h1", 2, 32, 2, 1, 16, 32, state_heads=2),
    "qwen3next": ArchSpec(
        "qwen3next", 2, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=16, state_heads=2, older=True
    ),
    "kimi-linear": ArchSpec(
        "kimi-linear", 2, 32, 2, 1, 24, 32, n_expert=4, n_ff_shared=32, state_heads=2, rank=16, n_behind=8
    ),
    "mamba2": ArchSpec("mamba2", 2, 32, 2, 1, 16, 32, state_heads=2),
    "nemotron_h_moe": ArchSpec(
        "nemotron_h_moe", 3, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=16, state_heads=2, n_latent=16
    ),
    "qwen3vl": ArchSpec("qwen3vl", 2, 32, 2, 1, 16, 32, sections=(3, 3, 2, 0)),
    "granite_swa": ArchSpec("granite_swa", 2, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=16, window=8),
    "cohere2moe": ArchSpec("cohere2moe", 3, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=32, window=8),
    "laguna": ArchSpec("laguna", 3, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=16, window=8, scaling="yarn"),
    "minicpm3": ArchSpec("minicpm3", 2, 32, 2, 2, 32, 32, rank=16, q_rank=16, scaling="longrope"),
    "deci": ArchSpec("deci", 3, 32, 2, 1, 16, 32),
    "mpt": ArchSpec("mpt", 2, 32, 2, 2, 16, 32, fused=True, biases=True),
    "olmo": ArchSpec("olmo", 2, 32, 2, 1, 16, 32),
    "grok": ArchSpec("grok", 2, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=16),
    "qwen35-head": ArchSpec("qwen35", 2, 32, 2, 1, 16, 32, state_heads=2, draft_head=True, draft_output=True),
    "glm4moe-head": ArchSpec(
        "glm4moe", 2, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=32, n_rot=8, draft_head=True
    ),
    "nemotron-head": ArchSpec(
        "nemotron_h_moe", 3, 32, 2, 1, 16, 32, n_expert=4, n_ff_shared=16, state_heads=2, draft_head=True
    ),
}


RARE_KINDS = ("bert", "t5", "rwkv", "plamo2")


def with_vocabulary(kind: str) -> Parts:
    return of_kind(generated(TINY), kind.encode())


def of_architecture(spec: ArchSpec) -> Parts:
    with tempfile.TemporaryDirectory() as directory:
        return take_apart(write_architecture(spec, Path(directory)).read_bytes())


def adapter_of_tiny() -> Parts:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        names = ("attn_q.", "attn_output.", "ffn_down.")
        frame = ("token_embd.weight", "output.weight")
        path = write_adapter(folder / "a.gguf", write_model(TINY, folder), names=names, frame=frame)
        return take_apart(path.read_bytes())


def assistant_of_gemma() -> Parts:
    with tempfile.TemporaryDirectory() as directory:
        path = write_assistant(ARCHITECTURES["gemma4"], Path(directory) / "a.gguf")
        return take_apart(path.read_bytes())


# what is damaged, and how
BASES: dict[str, tuple[Callable[[], Parts], Callable[[Parts, str, int, Path], str]]] = {
    "stories": (lambda: take_apart(STORIES.read_bytes()), write_mutant),
    "tiny": (lambda: generated(TINY), write_mutant),
    "q8_0": (lambda: generated(Q8_0), write_mutant),
    "byte-level": (lambda: byte_level(generated(TINY)), write_mutant),
    "gemma4-tokens": (lambda: merged(b"gemma4"), write_mutant),
    "hybriddna": (lambda: merged(b"hybriddna"), write_mutant),
    "whitespace": (lambda: merged(b"whitespace"), write_mutant),
    **{name: (partial(of_architecture, spec), write_mutant) for name, spec in ARCHITECTURES.items()},
    **{kind: (partial(with_vocabulary, kind), write_mutant) for kind in RARE_KINDS},
    "charsmap": (partial(with_vocabulary, "t5"), write_remapped),
    "adapter": (adapter_of_tiny, write_mutant),
    "assistant": (assistant_of_gemma, write_mutant),
    "retyped": (lambda: generated(WIDE), write_retyped),
    "resplit": (lambda: byte_level(generated(TINY)), write_resplit),
}


def attempt(what: Callable[[Path], None], path: Path) -> str:
    try:
        what(path)
    except (kvg.KVGraphError, FileNotFoundError) as error:
        return type(error).__name__
    return "ok"


def use_file(path: Path) -> None:
    with kvg.GgufFile(path) as file:
        assert isinstance(file.metadata, dict)
        assert isinstance(file.tensors, tuple)
        file.model_info()


def use_tokenizer(path: Path) -> None:
    """By itself, so that it must be safe even where no model would load."""
    with kvg.GgufFile(path) as file:
        tokenizer = Tokenizer(path, file._handle.call(LoadedVocabulary.read, {}))
    for token in range(min(tokenizer.n_vocab, 1000)):
        tokenizer.token_to_piece(token)
        tokenizer.is_eog(token)
    for text in TEXTS:
        for parse_special in (False, True):
            try:
                tokenizer.decode(tokenizer.encode(text, parse_special=parse_special))
            except kvg.InvalidArgumentError:
                continue  # a character that this vocabulary can't write


def use_model(path: Path) -> None:
    with (
        kvg.Model(path, device="cpu") as model,
        kvg.Context(model, n_ctx=32, n_threads=1, n_threads_batch=1) as ctx,
    ):
        assert isinstance(model.metadata, dict)
        batch = kvg.Batch()
        batch.extend([token % model.n_vocab for token in (1, 2, 3, model.n_vocab - 1)], 0, logits="all")
        ctx.decode(batch)
        assert ctx.embeddings().shape == (4, model.n_embd)
        if model.n_classes:
            assert len(ctx.classify(ctx.embeddings())) == 4
        if model.encodes:
            return
        assert ctx.logits().shape == (4, model.n_vocab)
        ctx.kv.checkpoint(0)
        ctx.kv.seq_rm(0, 0, 1)
        if ctx.kv.can_shift:
            ctx.kv.seq_add(0, 1, -1, -1)
        ctx.kv.defrag("fill")
        ctx.kv.update()
        ctx.kv.load(ctx.kv.save())
        ctx.kv.rewind(0, 2)
        Sampler(temperature=1.0, seed=1).sample(ctx.logits()[0])


def use_head(path: Path) -> None:
    """The model's own draft head."""
    with (
        kvg.Model(path, device="cpu", draft_heads=True) as model,
        kvg.Context(model, n_ctx=32, n_threads=1, n_threads_batch=1) as ctx,
    ):
        batch = kvg.Batch()
        batch.extend([token % model.n_vocab for token in (1, 2, 3)], 0, logits="last")
        ctx.decode(batch)
        assert len(ctx.draft([(0, model.n_vocab - 1, 3)])[0]) == 3
        ctx.kv.load(ctx.kv.save())


def use(path: Path) -> str:
    """A head is used where the sound file has one."""
    uses = [use_file, use_tokenizer, use_model, *([use_head] if "-head" in path.name else [])]
    return " ".join(f"{what.__name__[4:]}:{attempt(what, path)}" for what in uses)


def use_adapter(path: Path) -> str:
    """An adapter of TINY, which lies beside it."""

    def adapt(path: Path) -> None:
        with kvg.Model(write_model(TINY, path.parent), device="cpu") as model:
            adapter = model.load_adapter(path)
            assert isinstance(adapter.metadata, dict)
            with kvg.Context(model, n_ctx=32, n_threads=1, n_threads_batch=1) as ctx:
                ctx.set_adapters([(adapter, 0.5)])
                batch = kvg.Batch()
                batch.extend([1, 2, 3, model.n_vocab - 1], 0, logits="all")
                ctx.decode(batch)
                assert ctx.logits().shape == (4, model.n_vocab)
                ctx.kv.load(ctx.kv.save())

    return f"adapter:{attempt(adapt, path)}"


def use_assistant(path: Path) -> str:
    """An assistant of the model of Gemma 4's architecture, which lies beside it."""

    def draft(path: Path) -> None:
        target = write_architecture(ARCHITECTURES["gemma4"], path.parent)
        with (
            kvg.Model(target, device="cpu", assistant=path) as model,
            kvg.Context(model, n_ctx=32, n_threads=1, n_threads_batch=1) as ctx,
        ):
            batch = kvg.Batch()
            batch.extend([1, 2, 3], 0, logits="last")
            ctx.decode(batch)
            assert len(ctx.draft([(0, model.n_vocab - 1, 3)])[0]) == 3

    return f"file:{attempt(use_file, path)} assistant:{attempt(draft, path)}"


# who uses a file that is no whole model
USES = {"adapter": use_adapter, "assistant": use_assistant}


def in_child(task: Callable[[], str]) -> str:
    """What task() returns in a process of its own; what begins with "!" when it didn't get that far."""
    readable, writable = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            os.dup2(stderr.fileno(), 2)
            _be_the_child(task, writable)
        os.close(writable)
        with os.fdopen(readable) as pipe:
            answer = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stderr.seek(0)
        said = stderr.read()[-2000:].decode(errors="replace")
    if status == 0 and answer:
        return answer
    end = f"took over {SECONDS} s" if status == -signal.SIGALRM else f"ended with {status}"
    return f"! {end} after {answer!r}: {said}"


def _be_the_child(task: Callable[[], str], writable: int) -> None:
    status = 1
    try:
        signal.alarm(SECONDS)  # whose default is to kill, whatever native code is doing
        if not sanitizer.ADDRESS:  # which takes terabytes of address space for itself
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + BYTES,) * 2)
        os.write(writable, task().encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(folder: Path, base: str, first: int, count: int) -> None:
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort would start a debugger
    make, damage = BASES[base]
    parts = make()
    sound = folder / f"{base}.gguf"
    parts.raw().write(sound)
    # also makes the tables that ggml and libllama make once, before the forks
    use_it = USES.get(base, use)
    tell(base, "none", use_it(sound))
    for index in range(first, first + count):
        path = folder / f"{base}-{index}.gguf"
        changes = path.with_suffix(".txt")

        def task(index: int = index, path: Path = path, changes: Path = changes) -> str:
            changes.write_text(damage(parts, base, index, path))
            return use_it(path)

        changes.write_text("none yet")
        verdict = in_child(task)
        tell(path.stem, changes.read_text(), verdict)
        changes.unlink()
        if not verdict.startswith("!"):
            path.unlink()


def tell(mutant: str, changes: str, verdict: str) -> None:
    print(json.dumps({"mutant": mutant, "changes": changes, "verdict": verdict}), flush=True)


if __name__ == "__main__":
    for base, first, count in zip(sys.argv[2::3], sys.argv[3::3], sys.argv[4::3], strict=True):
        main(Path(sys.argv[1]), base, int(first), int(count))
