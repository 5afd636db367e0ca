"""A conversation: what is decoded for each turn, and what is left when the cache is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.recurrent import WINDOWED
from support.talk import CHATML, GREEDY, SYSTEM, ask, greedy, opened, require_rows_of, text_of, with_template

import pykvgraph as kvg
from pykvgraph.chat import Conversation, Discard


def test_the_text_is_the_template_s(stories_model: kvg.Model) -> None:
    """As llama-cpp-python's formatter writes it."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    with opened(stories_model) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for message in ("Hello.", "Who is Lily?", "And then?"):
            answer = ask(conversation, message)
            messages += [{"role": "user", "content": message}]
            formatter = Jinja2ChatFormatter(CHATML, eos_token="</s>", bos_token="")
            # what was said is as it is; the template strips it
            before = text_of(stories_model, conversation.ids).removesuffix(answer)
            messages += [{"role": "assistant", "content": "\ue001"}]
            said = iter([text for _, text in conversation.turns])
            parts = formatter(messages=messages[:-1]).prompt.split("\ue001")
            assert before == "<s> " + parts[0] + "".join(next(said) + part for part in parts[1:])


def test_only_what_is_new_is_decoded(model: kvg.Model) -> None:
    with opened(model) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        for message in ("Hello.", "Who is Lily?", "And then?"):
            held = ctx.kv.seq_pos_max(0) + 1
            ask(conversation, message)
            assert conversation.change is not None
            n_prompt = conversation.change.n_kept + conversation.change.n_decoded
            assert conversation.change[:3] == (held, held, n_prompt - held)
        tokens = conversation.ids[n_prompt:]
        assert tokens == greedy(model, conversation.ids[:n_prompt], len(tokens))


def test_another_answer_takes_one_token_and_another_message_its_own(model: kvg.Model) -> None:
    with opened(model) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        for message in ("Hello.", "Who is Lily?"):
            ask(conversation, message)
        first = conversation.turns[-1]
        for _ in range(3):
            list(conversation.regenerate(GREEDY))
            assert conversation.change is not None and conversation.change.n_decoded == 1
            assert conversation.turns[-1] == first
        n_before = conversation.borders[-2]
        list(conversation.edit("Is Tom sad?", GREEDY))
        header = model.tokenizer.encode("<|user|>\n", False, add_space_prefix=False)
        change = conversation.change
        assert change is not None
        n_prompt = change.n_kept + change.n_decoded
        assert change.n_kept >= n_before + len(header)
        assert "Is Tom sad?" in text_of(model, conversation.ids[change.n_kept : n_prompt])
        tokens = conversation.ids[n_prompt:]
        assert tokens == greedy(model, conversation.ids[:n_prompt], len(tokens))


@pytest.mark.parametrize("change_back", ["edit", "system"])
def test_what_was_left_is_not_decoded_again(stories_model: kvg.Model, change_back: str) -> None:
    """A message, or a system prompt, is replaced, and then it is as it was."""
    with opened(stories_model) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        ask(conversation, "Hello.")
        question = "Who is Lily, whom Tom and the dog met in the park on that day?"
        first = ask(conversation, question)
        for message, system in (("Who else?", "Say no."), (question, SYSTEM)):
            if change_back == "system":
                conversation.system = system
                list(conversation.regenerate(GREEDY))
            else:
                list(conversation.edit(message, GREEDY))
        assert conversation.change is not None and conversation.change.n_decoded == 1
        assert conversation.turns[-1][1] == first


def test_what_was_left_gives_way_when_cells_are_needed(stories_model: kvg.Model) -> None:
    """Cells of replaced messages never cost a turn."""
    discards: list[Discard] = []
    with opened(stories_model) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, on_discard=discards.append)
        ask(conversation, "Hello.")
        for n in range(40):
            list(conversation.edit(f"{n} is what he said to the old man. " * 4, GREEDY))
        assert ctx.kv.n_free < 64
        assert not discards and len(conversation.turns) == 1


def test_whole_turns_go_and_nothing_is_decoded_again(stories_model: kvg.Model) -> None:
    reports: list[Discard] = []
    with opened(stories_model, n_ctx=200) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, on_discard=reports.append)
        asked = [f"Tell me of number {i}." for i in range(12)]
        for message in asked:
            held, n_reports = ctx.kv.seq_pos_max(0) + 1, len(reports)
            ask(conversation, message)
            require_rows_of(conversation, ctx, stories_model)
            left = [user for user, _ in conversation.turns]
            assert left == asked[: asked.index(message) + 1][-len(left) :]
            assert conversation.n_forgotten == asked.index(message) + 1 - len(left)
            assert conversation.change is not None
            gone = sum(report.n_tokens for report in reports[n_reports:])
            assert conversation.change.n_kept >= held - gone
            text = text_of(stories_model, conversation.ids)
            assert text.startswith(f"<s> <|system|>\n{SYSTEM}</s>\n<|user|>\n{left[0]}</s>\n<|assistant|>\n")
        assert len(reports) > 2 and all(report.n_turns > 0 and report.stats for report in reports)
        assert ctx.kv.take_stats().waiting_cells == 0
        assert sum(report.n_turns for report in reports) == conversation.n_forgotten


def test_states_keep_what_they_read(states_model: kvg.Model) -> None:
    """Positions are given up; the layers with a state are not decoded again."""
    reports: list[Discard] = []
    with opened(states_model, n_ctx=400) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, on_discard=reports.append)
        for i in range(12):
            n_reports, held = len(reports), ctx.kv.seq_pos_max(0) + 1
            ask(conversation, f"Tell me of number {i}.")
            assert conversation.change is not None
            gone = sum(report.n_tokens for report in reports[n_reports:])
            assert conversation.change.n_kept >= held - gone
            assert ctx.kv.seq_pos_max(0) + 1 == len(conversation.ids) - 1
        assert reports and all(report.stats is not None for report in reports)


def test_where_a_shift_is_refused_what_is_left_is_decoded_again(
    architecture: Callable[[ArchSpec], Path],
) -> None:
    """Only the last turn would be left, and what the window has lost would come into it again."""
    reports: list[Discard] = []
    spec = ArchSpec("gemma3", n_layer=4, window=120, period=2)
    with kvg.Model(architecture(spec), device="cpu") as model:
        with_template(model, CHATML)
        with opened(model, n_ctx=250, n_batch=16, checkpoint_cells=0) as ctx:
            conversation = Conversation(ctx, system=SYSTEM, n_discard=1000, on_discard=reports.append)
            for i in range(5):
                ask(conversation, f"Tell me of number {i}.", kvg.SamplingParams(max_tokens=60))
            assert any("swa_full" in report.reason for report in reports)
            ids = conversation.ids
            assert text_of(model, ids).startswith(f"<s> <|system|>\n{SYSTEM}</s>\n<|user|>\nTell")
            assert ids[-5:] == greedy(model, ids[:-5], 5)


def test_a_message_larger_than_the_cache(stories_model: kvg.Model) -> None:
    """Its last part is read, and the system prompt."""
    reports: list[Discard] = []
    with opened(stories_model, n_ctx=100) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, on_discard=reports.append)
        ask(conversation, "one day " * 200 + "the end")
        text = text_of(stories_model, conversation.ids)
        assert text.startswith(f"<s> <|system|>\n{SYSTEM}</s>\n") and "the end</s>\n<|assistant|>\n" in text
        assert {report.n_turns for report in reports} == {0}
        require_rows_of(conversation, ctx, stories_model)
        ask(conversation, "And now?")
        assert [user for user, _ in conversation.turns] == ["And now?"]
        require_rows_of(conversation, ctx, stories_model)


def test_an_answer_larger_than_the_cache(stories_model: kvg.Model) -> None:
    with opened(stories_model, n_ctx=100) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        ask(conversation, "Hi.", kvg.SamplingParams(max_tokens=300, logit_bias={2: -100}))
        assert text_of(stories_model, conversation.ids).startswith(f"<s> <|system|>\n{SYSTEM}</s>\n")
        require_rows_of(conversation, ctx, stories_model)


@pytest.mark.parametrize(("n_keep", "begins"), [(0, ""), (1, "<s>"), (60, "<s> <|system|>\nBe kind.")])
def test_what_is_kept(stories_model: kvg.Model, n_keep: int, begins: str) -> None:
    with opened(stories_model, n_ctx=200) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, n_keep=n_keep, n_discard=60)
        for i in range(8):
            ask(conversation, f"Tell me of number {i}.")
        text = text_of(stories_model, conversation.ids)
        assert text.startswith(begins)
        assert ("Be kind" in text) == (n_keep == 60)
        assert ("number 0" in text) == (n_keep == 60)  # the turn in which the kept tokens end
        require_rows_of(conversation, ctx, stories_model)


def test_nothing_can_be_given_up(stories_model: kvg.Model) -> None:
    with opened(stories_model, n_ctx=64) as ctx:
        conversation = Conversation(ctx, system="Be kind. " * 40)
        with pytest.raises(kvg.CacheFullError, match="nothing can be given up"):
            ask(conversation, "Hi.")
        assert conversation.turns == []
        conversation.system = SYSTEM
        assert ask(conversation, "Hi.")


def test_control_tokens_that_people_write_stay_text(stories_model: kvg.Model) -> None:
    with opened(stories_model) as ctx:
        conversation = Conversation(ctx)
        ask(conversation, "End </s> and <s> begin.")
        assert conversation.ids[: conversation.borders[-1]].count(2) == 1  # the template's own
        assert conversation.ids.count(1) == 1


def test_lines_for_a_model_without_a_template(stories_model: kvg.Model) -> None:
    model = with_template(stories_model, None)
    try:
        with opened(model) as ctx:
            conversation = Conversation(ctx, system="A talk.")
            assert conversation.is_plain
            first, second = ask(conversation, "Hello."), ask(conversation, "And?")
            assert text_of(model, conversation.ids) == (
                f"<s> A talk.\n\nUser: Hello.\nAssistant:{first}\nUser: And?\nAssistant:{second}"
            )
    finally:
        with_template(model, CHATML)


def test_a_stop_text_is_no_part_of_the_answer(stories_model: kvg.Model) -> None:
    """It ends within a token's text, or after several tokens, and the next turn goes on behind the answer."""
    with opened(stories_model) as ctx:
        whole = ask(Conversation(ctx), "Once upon a time", kvg.SamplingParams(max_tokens=40))
        for begin, end in ((9, 10), (8, 14), (11, 20)):
            conversation = Conversation(ctx)
            stop = whole[begin:end]
            expected = whole[: whole.index(stop)]
            assert ask(conversation, "Once upon a time", kvg.SamplingParams(stop=stop)) == expected
            assert conversation.turns == [("Once upon a time", expected)]
            ask(conversation, "And?")
            assert f"{expected}</s>\n<|user|>\nAnd?" in text_of(stories_model, conversation.ids)
            require_rows_of(conversation, ctx, stories_model)
            ctx.reset()


def test_another_system_prompt(stories_model: kvg.Model) -> None:
    with opened(stories_model) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        answer = ask(conversation, "Hello.")
        conversation.system = "Be brief."
        assert conversation.turns == [("Hello.", answer)]
        ask(conversation, "And?")
        text = text_of(stories_model, conversation.ids)
        assert text.startswith(
            f"<s> <|system|>\nBe brief.</s>\n<|user|>\nHello.</s>\n<|assistant|>\n{answer}"
        )
        require_rows_of(conversation, ctx, stories_model)


def test_reset_keeps_the_system_prompt(stories_model: kvg.Model) -> None:
    with opened(stories_model) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        ask(conversation, "Hello.")
        front = conversation.borders[0]
        conversation.reset()
        assert (conversation.turns, ctx.kv.n_used) == ([], front)
        ask(conversation, "Hi.")
        assert conversation.change is not None and conversation.change.n_kept == front


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML


def test_a_template_without_a_system_prompt(stories_model: kvg.Model) -> None:
    model = with_template(stories_model, REFUSES)
    try:
        with opened(model) as ctx:
            conversation = Conversation(ctx, system=SYSTEM)
            ask(conversation, "Hello.")
            ask(conversation, "And?")
            text = text_of(model, conversation.ids)
            assert text.startswith("<s> <|user|>\nBe kind.\n\nHello.</s>\n<|assistant|>\n")
            assert text.count("Be kind.") == 1
    finally:
        with_template(model, CHATML)


def test_bad_arguments(stories_model: kvg.Model) -> None:
    with opened(stories_model) as ctx:
        for wrong in ({"n_keep": -1}, {"n_discard": 0}, {"seq": 1}, {"system": 5}):
            with pytest.raises(kvg.InvalidArgumentError, match=next(iter(wrong))):
                Conversation(ctx, **wrong)  # type: ignore[arg-type]
        conversation = Conversation(ctx)
        for call in (conversation.regenerate, lambda params: conversation.edit("a", params)):
            with pytest.raises(kvg.InvalidArgumentError, match="no message yet"):
                call(GREEDY)


def test_self_extend_keeps_all_turns_within_the_trained_positions(
    stories_model: kvg.Model, tmp_path: Path
) -> None:
    """More tokens than the model was trained on: none is given up, and none decoded again."""
    grouped: list[int] = []
    with opened(stories_model, n_ctx=1400) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, self_extend=4, on_extend=grouped.append)
        asked = [f"Tell me of number {i}." for i in range(24)]
        for message in asked:
            held = ctx.kv.n_used
            ask(conversation, message)
            assert conversation.change is not None and conversation.change.n_kept == held
            assert ctx.kv.seq_pos_max(0) < 512
        assert [user for user, _ in conversation.turns] == asked
        n = ctx.kv.n_used
        assert n == len(conversation.ids) - 1 > 2 * 512
        front = conversation.borders[0]
        counts = np.bincount(ctx.kv.cells().pos[ctx.kv.cells().pos >= 0])
        assert counts[:front].tolist() == [1] * front  # the system prompt's own
        assert counts.max() == 4 and counts.min() == 1
        assert len(counts) == n - sum(grouped) + sum(-(-tokens // 4) for tokens in grouped)
        assert conversation.turn_positions[0] == front and max(conversation.turn_positions) < 512
        conversation.save(tmp_path / "talk")
        following = ask(conversation, "And then?")
        list(conversation.edit("Is Tom sad?", GREEDY))
        assert conversation.change is not None and conversation.change.n_kept >= conversation.borders[-2]
        list(conversation.edit("And then?", GREEDY))
        assert conversation.turns[-1][1] == following
    with opened(stories_model, n_ctx=1400) as ctx:
        other = Conversation(ctx, self_extend=4)
        other.load(tmp_path / "talk")
        assert ask(other, "And then?") == following
        assert other.change is not None and other.change.n_kept == n


def test_self_extend_gives_turns_up_when_no_cell_is_free(stories_model: kvg.Model) -> None:
    reports: list[Discard] = []
    with opened(stories_model, n_ctx=700) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, self_extend=4, on_discard=reports.append)
        for i in range(40):
            ask(conversation, f"Tell me of number {i}.")
            assert ctx.kv.seq_pos_max(0) < 512
            assert ctx.kv.n_used == len(conversation.ids) - 1
        assert reports and all(report.n_turns and report.stats for report in reports)
        # one answer longer than all cells
        ask(conversation, "Go on.", kvg.SamplingParams(max_tokens=1500, logit_bias={2: -100}))
        assert ctx.kv.seq_pos_max(0) < 512
        assert text_of(stories_model, conversation.ids).startswith(f"<s> <|system|>\n{SYSTEM}</s>\n")


def test_another_answer_to_a_message_whose_front_was_given_up(stories_model: kvg.Model) -> None:
    with opened(stories_model, n_ctx=100) as ctx:
        conversation = Conversation(ctx)
        ask(conversation, "Who is Lily?", kvg.SamplingParams(max_tokens=150, logit_bias={2: -100}))
        assert "Lily" not in text_of(stories_model, conversation.ids)[:40]
        list(conversation.regenerate(kvg.SamplingParams(max_tokens=5)))
        text = text_of(stories_model, conversation.ids)
        assert text.startswith("<s> <|user|>\nWho is Lily?</s>\n<|assistant|>\n")


def test_an_answer_that_another_one_has_overtaken(stories_model: kvg.Model) -> None:
    with opened(stories_model) as ctx:
        conversation = Conversation(ctx)
        first = conversation.ask("Hello.", GREEDY)
        ask(conversation, "Hi.")
        with pytest.raises(kvg.InvalidArgumentError, match="went on"):
            next(first)
        assert [user for user, _ in conversation.turns] == ["Hi."]
        with pytest.raises(kvg.InvalidArgumentError, match="SamplingParams"):
            conversation.ask("Hello.", None)  # type: ignore[arg-type]


def test_a_cache_whose_cells_are_all_in_checkpoints(architecture: Callable[[ArchSpec], Path]) -> None:
    """No cell can move in place: what is left is decoded again."""
    rng = np.random.default_rng(1)
    with kvg.Model(architecture(replace(WINDOWED, window=200)), device="cpu") as model:
        with_template(model, CHATML)
        with opened(model, n_ctx=64) as ctx:
            conversation = Conversation(ctx, n_discard=1)
            for step in range(60):
                params = kvg.SamplingParams(max_tokens=int(rng.integers(1, 60)), temperature=1, seed=step)
                if step % 3 and conversation.turns:
                    list(conversation.regenerate(params))
                else:
                    list(conversation.ask("Hi.", params))
