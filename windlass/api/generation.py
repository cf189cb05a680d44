"""Calls that generate with a model."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from windlass.api.keywords import sections
from windlass.config import Overrides, read, words
from windlass.config.sampling import Sampling
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.evaluation.chat import Conversation, Messages, encoded, ends
from windlass.evaluation.finished_run import FinishedRun
from windlass.evaluation.generate import Generator, Prompt
from windlass.evaluation.prompts import Example
from windlass.evaluation.published_model import open_model
from windlass.formats import prompt_text

Question = str | Messages | dict[str, Any] | Example
ANSWER_TOKENS = 512  # at most in an answer, unless a call says otherwise


def generate(
    run: str | Path | None,
    prompts: str | Sequence[Question],
    overrides: Overrides = (),
    *,
    chat: bool = False,
    weights: str = "last",
    step: int | None = None,
    batch: int = 16,
    **sampling: Any,
) -> list[str]:
    """Completions of prompts by the model of a run, a folder or the hub.

    A prompt is text to continue, or with `chat` a user message; a list of messages is a chat to
    answer. Of a run on sections it is a question, or a mapping with the columns in front of the
    response: they get the headings that the model was trained with. `sampling` has the fields of
    `Sampling`, and may have sections of the recipe to override, such as `device="cpu"`.
    """
    every = [prompts] if isinstance(prompts, str) else prompts
    how = {"chat": chat, "weights": weights, "step": step, "batch": batch}
    return list(each(run, every, overrides, **how, **sampling))


def each(
    run: str | Path | None,
    prompts: Sequence[Question],
    overrides: Overrides = (),
    *,
    chat: bool = False,
    weights: str = "last",
    step: int | None = None,
    batch: int = 16,
    begin: int = 0,
    as_text: bool = False,
    **sampling: Any,
) -> Iterator[str]:
    """Completions one after the other, as they come, in batches of `batch` prompts.

    Those before `begin` are left out: they are there from an earlier call. With `as_text`, texts
    are continued as they stand, whatever the run was trained on.
    """
    if batch < 1:
        raise UserError(f"batch is {batch}; it must be 1 or more")
    keys, rest = sections(sampling)
    how = read(Sampling, rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        generator = build_generator(opened)
        framed = partial(_prompt, opened, generator, is_chat=chat, as_text=as_text)
        inputs = [framed(*_placed(one, number)) for number, one in enumerate(prompts, start=1)]
        yield from generator.each(inputs, how, batch, begin)


def stream(
    run: str | Path | None,
    prompt: str,
    overrides: Overrides = (),
    *,
    weights: str = "last",
    step: int | None = None,
    echo: bool = False,
    **sampling: Any,
) -> Iterator[str]:
    """Completion of a prompt by a run's model, streamed in pieces.

    With `echo` the first piece is the prompt as the model reads it.
    """
    keys, rest = sections(sampling)
    how = read(Sampling, rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        generator = build_generator(opened)
        text = opened.run.data.format.asked(prompt, "the prompt")
        if echo:
            yield text
        yield from generator.stream(text, how)


def chat(
    run: str | Path | None,
    overrides: Overrides = (),
    *,
    system: str | None = None,
    thinking: str = "none",
    weights: str = "last",
    step: int | None = None,
    **sampling: Any,
) -> Conversation:
    """Conversation with the model of a run, a folder or the hub, which remembers it.

    Of a run on sections each message is a question by itself, under the headings of its data.
    `sampling` has the fields of `Sampling`, by which an answer has at most 512 tokens here.
    """
    keys, rest = sections(sampling)
    how = read(Sampling, {"tokens": ANSWER_TOKENS} | rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        generator = build_generator(opened)
    context: dict[str, Any] = {"longest": opened.context_length, "scope": opened.scope}
    if (format := opened.run.data.format).asked_columns:
        context["frame"] = partial(format.asked, where="a question")
        format.asked("", "a question")  # refused before anything is asked, if it needs more columns
    else:
        _check_chats(generator, opened.folder)
    return Conversation(generator, how, system=system, thinking=thinking, **context)


def build_generator(opened: FinishedRun, model: Any = None) -> Generator:
    """Generator with the model of a run, or a refusal where that generates no text.

    A `model` that is loaded already is not loaded again.
    """
    vocabulary = check_generates(opened)
    return Generator(model or opened.model(), vocabulary, ends(vocabulary))


def check_generates(opened: FinishedRun) -> Vocabulary:
    """Vocabulary of a run, or a refusal where that generates no text."""
    if not opened.run.model.causal:
        family = type(opened.run.model).__module__.rpartition(".")[2]
        raise UserError(
            f"{opened.folder} cannot generate: {family}, its family, attends in both directions, "
            "and no token is predicted from those before it; "
            f"`windlass evaluate {opened.folder}` measures its loss"
        )
    if opened.run.objective.scores:
        raise UserError(
            f"{opened.folder} cannot generate: it is a reward model, which scores answers and "
            f"predicts no token; `windlass evaluate {opened.folder}` measures its loss"
        )
    if (vocabulary := opened.vocabulary) is None:
        raise UserError(
            f"{opened.folder} was trained on blocks without a vocabulary, so that there is no text "
            f"to generate; `windlass evaluate {opened.folder}` measures its loss"
        )
    return vocabulary


def _placed(question: Question, number: int) -> tuple[str | Messages | dict[str, Any], str]:
    """A question, or the messages of a chat, and its place for messages of ours."""
    where = f"prompt {number}"
    if isinstance(question, Example):
        question, where = question
    if isinstance(question, dict) and isinstance(messages := question.get("messages"), list):
        return messages, where
    return question, where


def _prompt(
    opened: FinishedRun,
    generator: Generator,
    question: str | Messages | dict[str, Any],
    where: str,
    *,
    is_chat: bool,
    as_text: bool,
) -> Prompt:
    """Prompt as a generator takes it: text, or the tokens of a chat."""
    if not isinstance(question, list) and not is_chat:
        asked = prompt_text if as_text else opened.run.data.format.asked
        return asked(question, where)
    _check_chats(generator, opened.folder)
    if not isinstance(question, list):
        question = [{"role": "user", "content": prompt_text(question, where)}]
    return encoded(generator.vocabulary, question)


def _check_chats(generator: Generator, folder: Path) -> None:
    if generator.vocabulary.chat is None:
        raise UserError(
            f"{folder} has no chat template, since its tokenizer came without one; "
            f'`windlass generate {folder} "..."` continues a text'
        )
