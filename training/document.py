"""What a training step is made of: token ids, and what each counts."""

from __future__ import annotations

from dataclasses import dataclass, field

ANSWER_LOSS = 1.0


@dataclass
class Document:
    """Token ids, how much each token's prediction counts in the loss, and which tokens are filler.

    subjects: the number of what a token is about, at each place where the model's first half should know it.
    """

    ids: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    filler: list[bool] = field(default_factory=list)
    subjects: dict[int, int] = field(default_factory=dict)

    def add(self, ids: list[int], loss: float, filler: bool = False) -> None:
        self.ids += ids
        self.loss += [loss] * len(ids)
        self.filler += [filler] * len(ids)

    def cut(self, length: int) -> Document:
        subjects = {place: subject for place, subject in self.subjects.items() if place < length}
        return Document(self.ids[:length], self.loss[:length], self.filler[:length], subjects)

    def __len__(self) -> int:
        return len(self.ids)


def joined(parts: list[Document], length: int | None) -> Document:
    whole = Document()
    for part in parts:
        whole.ids += part.ids
        whole.loss += part.loss
        whole.filler += part.filler
    return Document(whole.ids[:length], whole.loss[:length], whole.filler[:length])
