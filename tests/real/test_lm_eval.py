"""lm-eval over HTTP on SmolLM2: its accuracies are those of libllama's logits on the same file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import chance, real
from support.clients.environment import python_of
from support.engines import run_of
from support.everyday import Question, endings, facts, write_tasks
from support.real import Floats, Libllama, prompt_of
from support.referee import Referee
from support.served import served_alone

import pykvgraph as kvg

EACH = 1 if chance.SHARE == 1 else 4  # of the 50 questions of each set: a commit tries each fourth one
SETS = {"endings": endings()[::EACH], "facts": facts()[::EACH]}
SAID = facts()[:4]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
CLOSE = 1e-3  # of an answer's log probability, with weights in F32; 3e-5 was the most


class Told(NamedTuple):
    """metrics: by task. samples: of a task, in the order of its questions."""

    metrics: dict[str, dict[str, float]]
    samples: dict[str, list[dict[str, Any]]]

    def log_probabilities(self, task: str) -> Floats:
        """Of each question's choices."""
        return np.array([[float(told[0][0]) for told in each["resps"]] for each in self.samples[task]])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    python_of("together")
    arguments = ("-c", "2048", "-np", "4", "--alias", "smollm2", *EXACT)
    with served_alone(real.in_f32(real.SMOLLM2), *arguments) as (url, _):
        yield url


def asked(folder: Path, tasks: str, model: str, url: str, *arguments: str, **settings: Any) -> Told:
    """What lm-eval's command tells."""
    write_tasks(folder, SETS, {"said": SAID})
    settings = {"model": "smollm2", "base_url": url, "max_length": 512, **settings}
    command = [str(python_of("together")), "-m", "lm_eval", "run", "--model", model, "--tasks", tasks]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
    command += ["--include_path", str(folder), "--output_path", str(folder / "told"), "--log_samples"]
    environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "cache")}
    ended = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    results = json.loads(next((folder / "told").rglob("results_*.json")).read_text(encoding="utf-8"))
    samples = {}
    for task in tasks.split(","):
        lines = next((folder / "told").rglob(f"samples_{task}_*.jsonl")).read_text(encoding="utf-8")
        samples[task] = sorted(map(json.loads, lines.splitlines()), key=lambda each: each["doc_id"])
    return Told(results["results"], samples)


@pytest.fixture(scope="module")
def by_tokens(address: str, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """With no more settings than an address: lm-eval finds that the server has a tokenizer."""
    folder = tmp_path_factory.mktemp("tokens")
    return asked(folder, "endings,facts", "local-completions", f"{address}/v1/completions", "-b", "16")


@pytest.fixture(scope="module")
def by_libllama(smollm2: kvg.Model) -> dict[str, Floats]:
    """The log probability of each choice behind its question."""
    with Referee(real.in_f32(real.SMOLLM2), flash=False, kv_type="f32") as referee:
        return {
            task: np.array([_of_choices(referee, smollm2, question) for question in questions])
            for task, questions in SETS.items()
        }


def _of_choices(referee: Referee, model: kvg.Model, question: Question) -> list[float]:
    encode = model.tokenizer.encode
    begin = encode(question.text, add_special=False)
    n = len(begin)
    referee.seq_rm(0, 0, -1)
    behind = real.log_probabilities(referee.decode(run_of(begin, 0)))[-1]
    found = []
    for choice in question.choices:
        said = encode(f"{question.text} {choice}", add_special=False)[n:]
        rows = [behind]
        if said[1:]:
            rows += [*real.log_probabilities(referee.decode(run_of(said[:-1], n)))]
            referee.seq_rm(0, n, -1)
        found.append(float(sum(row[id] for row, id in zip(rows, said, strict=True))))
    return found


@pytest.mark.client("lm-eval", "log probabilities of a prompt (`echo`)")
@pytest.mark.parametrize("task", SETS)
def test_accuracies_are_those_of_libllamas_logits(
    by_tokens: Told, by_libllama: dict[str, Floats], task: str
) -> None:
    """acc: the likeliest choice is the right one. acc_norm: the likeliest by its number of characters."""
    true, told = by_libllama[task], by_tokens.log_probabilities(task)
    assert np.abs(told - true).max() <= CLOSE
    lengths = np.array([[len(choice) for choice in question.choices] for question in SETS[task]])
    right = np.array([question.right for question in SETS[task]])
    metrics = by_tokens.metrics[task]
    assert metrics["acc,none"] == (true.argmax(axis=1) == right).mean()
    assert metrics["acc_norm,none"] == ((true / lengths).argmax(axis=1) == right).mean()
    assert 0.35 < metrics["acc,none"] < 1  # some are wrong, and it is no chance
    print(f"{task}: {metrics}")


@pytest.mark.client("lm-eval", "several requests at a time")
def test_texts_in_place_of_tokens(by_tokens: Told, address: str, tmp_path: Path) -> None:
    """tokenized_requests=False: lm-eval turns its tokens into texts again. Four requests at a time."""
    url, others = f"{address}/v1/completions", {"tokenized_requests": False, "num_concurrent": 4}
    told = asked(tmp_path, "endings", "local-completions", url, "--limit", "8", **others)
    wanted = by_tokens.log_probabilities("endings")[:8]
    assert np.abs(told.log_probabilities("endings") - wanted).max() <= CLOSE


@pytest.mark.client("lm-eval", "an answer")
def test_a_chat_is_asked(address: str, tmp_path: Path, smollm2: kvg.Model, libllama_f32: Libllama) -> None:
    """local-chat-completions: the answers are the likeliest by libllama."""
    url = f"{address}/v1/chat/completions"
    told = asked(tmp_path, "said", "local-chat-completions", url, "--apply_chat_template")
    for question, sample in zip(SAID, told.samples["said"], strict=True):
        (text,) = sample["resps"][0]
        prompt = prompt_of(smollm2, [{"role": "user", "content": question.text}])
        said = libllama_f32.model.encode(text)
        assert (
            text
            and libllama_f32.behind(libllama_f32.model.encode(prompt, parse_special=True), said).max()
            <= CLOSE
        )
    assert "Paris" in told.samples["said"][0]["resps"][0][0]
