"""Two sets of questions with four answers each, written for these tests, as tasks of lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parents[1] / "data"
_N_CHOICES = 4
_NEIGHBOURS = 5  # lines of a file that are about the same things


class Question(NamedTuple):
    """text: what the model reads. choices: what may come behind it and a space. right: which is true."""

    text: str
    choices: tuple[str, ...]
    right: int


def endings() -> list[Question]:
    """How sentences go on: 50."""
    return _questions("everyday-endings.txt", "{}")


def facts() -> list[Question]:
    """What is known to all: 50."""
    return _questions("everyday-facts.txt", "Question: {}\nAnswer:")


def write_tasks(folder: Path, chosen: dict[str, list[Question]], said: dict[str, list[Question]]) -> None:
    """Tasks of lm-eval by their names: those whose choices are compared, and those that the model answers."""
    for name, questions in (chosen | said).items():
        lines = [json.dumps(question._asdict()) for question in questions]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            **(_GENERATED if name in said else _CHOSEN),
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML, too


_CHOSEN = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
_GENERATED = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[right]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
    "metric_list": [{"metric": "exact_match"}],
}


def _questions(name: str, form: str) -> list[Question]:
    """The other answers to a question are those of its neighbours; the right one has each place as often."""
    pairs = [line.split(" | ") for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    found = []
    for i, (text, answer) in enumerate(pairs):
        first = i - i % _NEIGHBOURS
        others = [pairs[first + (i + k) % _NEIGHBOURS][1] for k in range(1, _N_CHOICES)]
        right = i % _N_CHOICES
        choices = (*others[:right], answer, *others[right:])
        found.append(Question(form.format(text), choices, right))
    return found
