"""Calls that generate with a model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from windlass.api.keywords import sections
from windlass.config import Overrides, read, words
from windlass.config.sampling import Sampling
from windlass.errors import UserError
from windlass.evaluation.chat import Conversation, Messages, encoded, ends
from windlass.evaluation.finished_run import FinishedRun
from windlass.evaluation.generate import Generator, Prompt
from windlass.evaluation.published_model import open_model

ANSWER_TOKENS = 512  # at most in an answer, unless a call says otherwise


def generate(
    run: str | Path | None,
    prompts: str | Sequence[str | Messages],
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
    answer. `sampling` has the fields of `Sampling`, and may have sections of the recipe to
    override, such as `device="cpu"`.
    """
    every = [prompts] if isinstance(prompts, str) else prompts
    how = {"chat": chat, "weights": weights, "step": step, "batch": batch}
    return list(each(run, every, overrides, **how, **sampling))


def each(
    run: str | Path | None,
    prompts: Sequence[str | Messages],
    overrides: Overrides = (),
    *,
    chat: bool = False,
    weights: str = "last",
    step: int | None = None,
    batch: int = 16,
    begin: int = 0,
    **sampling: Any,
) -> Iterator[str]:
    """Completions one after the other, as they come, in batches of `batch` prompts.

    Those before `begin` are left out: they are there from an earlier call.
    """
    if batch < 1:
        raise UserError(f"batch is {batch}; it must be 1 or more")
    keys, rest = sections(sampling)
    how = read(Sampling, rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        generator = build_generator(opened)
        inputs = [_prompt(prompt, chat, generator, opened.folder) for prompt in prompts]
        yield from generator.each(inputs, how, batch, begin)


def stream(
    run: str | Path | None,
    prompt: str,
    overrides: Overrides = (),
    *,
    weights: str = "last",
    step: int | None = None,
    **sampling: Any,
) -> Iterator[str]:
    """Completion of a prompt by a run's model, streamed in pieces."""
    keys, rest = sections(sampling)
    how = read(Sampling, rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        yield from build_generator(opened).stream(prompt, how)


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

    `sampling` has the fields of `Sampling`, by which an answer has at most 512 tokens here.
    """
    keys, rest = sections(sampling)
    how = read(Sampling, {"tokens": ANSWER_TOKENS} | rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        generator = build_generator(opened)
    _check_chats(generator, opened.folder)
    context = {"longest": opened.context_length, "scope": opened.scope}
    return Conversation(generator, how, system=system, thinking=thinking, **context)


def build_generator(opened: FinishedRun) -> Generator:
    """Generator with the model of a run, or a refusal where that generates no text."""
    if not opened.run.model.causal:
        family = type(opened.run.model).__module__.rpartition(".")[2]
        raise UserError(
            f"{opened.folder} cannot generate: {family}, its family, attends in both directions, "
            "and no token is predicted from those before it; "
            f"`windlass evaluate {opened.folder}` measures its loss"
        )
    if (vocabulary := opened.vocabulary) is None:
        raise UserError(
            f"{opened.folder} was trained on blocks without a vocabulary, so that there is no text "
            f"to generate; `windlass evaluate {opened.folder}` measures its loss"
        )
    return Generator(opened.model(), vocabulary, ends(vocabulary))


def _prompt(prompt: str | Messages, is_chat: bool, generator: Generator, folder: Path) -> Prompt:
    """Prompt as a generator takes it: text, or the tokens of a chat."""
    if isinstance(prompt, str) and not is_chat:
        return prompt
    _check_chats(generator, folder)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return encoded(generator.vocabulary, messages)


def _check_chats(generator: Generator, folder: Path) -> None:
    if generator.vocabulary.chat is None:
        raise UserError(
            f"{folder} has no chat template, since its tokenizer came without one; "
            f'`windlass generate {folder} "..."` continues a text'
        )
