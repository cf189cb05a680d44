"""Conversations: what the model is sent, where an answer ends, and what is remembered."""

import dataclasses
import logging
from pathlib import Path

import equinox as eqx
import jax
import pytest

from tests import published, tiny
from windlass.config.sampling import Sampling
from windlass.data import vocabulary as vocabularies
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.evaluation.chat import Conversation, encoded, ends
from windlass.evaluation.generate import Generator

SAMPLING = Sampling(tokens=12, seed=1)
SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <|im_end|>"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Zoë?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return published.write(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(scope="module")
def vocabulary(folder) -> Vocabulary:
    return vocabularies.load(str(folder))


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(tiny.config("qwen2"), vocab=published.VOCAB)
    return jax.tree.map(lambda x: 4 * x, eqx.filter_jit(config.init)(jax.random.key(1)))


@pytest.fixture(scope="module")
def generator(model, vocabulary) -> Generator:
    return Generator(model, vocabulary, ends(vocabulary))


def test_the_model_is_sent_the_tokens_that_transformers_would_send(vocabulary, folder):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(folder))
    expected = reference.apply_chat_template(SAID, add_generation_prompt=True, return_dict=False)
    assert encoded(vocabulary, SAID).tolist() == expected


def test_the_whole_conversation_is_sent_with_each_turn(generator, vocabulary):
    talk = Conversation(generator, SAMPLING, system="Be brief.", longest=40)
    first = talk("Hello")
    said = [*SAID[:1], {"role": "user", "content": "Hello"}]
    assert first == "".join(generator.stream(encoded(vocabulary, said), SAMPLING))
    second = talk("And?")
    said += [{"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
    assert second == "".join(generator.stream(encoded(vocabulary, said), SAMPLING))
    assert talk.messages == [*said, {"role": "assistant", "content": second}]
    assert 1 <= talk.tokens <= 12
    length = len(encoded(vocabulary, said)) + talk.tokens
    assert length > 40 and talk.warning() == (
        f"this conversation has {length} tokens, and the context length of the model is 40; "
        "answers get worse from here, and /reset clears the conversation"
    )
    talk.reset()
    assert talk.messages == SAID[:1]
    assert talk("Hello") == first


def test_an_answer_that_is_not_waited_for_is_remembered_as_far_as_it_came(generator):
    talk = Conversation(generator, SAMPLING, longest=500)
    pieces = talk.stream("Hello")
    heard = next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[1:] == [{"role": "assistant", "content": heard}]
    assert talk.warning() is None


def test_turns_of_about_the_same_length_compile_nothing_new(generator, caplog):
    talk = Conversation(generator, SAMPLING)
    talk("Hello")
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        talk.reset()
        talk("Good evening")
    assert "Finished XLA compilation" not in caplog.text


def test_the_token_that_ends_a_turn_ends_an_answer_beside_the_one_that_ends_a_document(folder):
    # As in a base model, whose documents end otherwise than its turns.
    base = vocabularies.load(str(folder), "<|endoftext|>")
    assert base.eos == 256
    assert ends(base) == {256, published.VOCAB - 1}


def test_a_template_that_refuses_a_conversation_is_told_and_nothing_is_kept(model, vocabulary):
    strict = vocabulary.with_template("{{ raise_exception('System role not supported') }}")
    talk = Conversation(Generator(model, strict), SAMPLING, system="Be brief.")
    with pytest.raises(UserError) as refusal:
        talk("Hello")
    assert str(refusal.value) == (
        "the chat template refuses this conversation: System role not supported"
    )
    assert talk.turns == []


def test_a_thinking_that_is_not_known_is_refused(generator):
    with pytest.raises(UserError) as refusal:
        Conversation(generator, SAMPLING, thinking="deep")
    assert str(refusal.value) == "thinking is deep; it must be none, off or on"
