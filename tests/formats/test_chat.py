import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from tests.formats.templates import DEEPSEEK, HARMONY, LLAMA3, MISTRAL, QWEN3, QWEN25, SHAPES, Shape
from tests.prepared import tokenized
from windlass.data import Data, Tokenized, prepare
from windlass.data.checks import Checks
from windlass.data.pack import Sequences
from windlass.data.show import COLORS, row, table
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import learn, load
from windlass.errors import UserError
from windlass.formats.chat import Format
from windlass.hub.chat_template import Template, chat_prompt
from windlass.sources import jsonl
from windlass.sources.stories import tell

SYSTEM = {"role": "system", "content": "Be brief."}
EMPTY = "<think>\n\n</think>\n\n"
PLAIN = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Good day, how can I help?"},
    {"role": "user", "content": "Say it twice"},
    {"role": "assistant", "content": " It, it.\nDone. "},
]


@pytest.fixture(scope="module")
def words() -> Library:
    return Library.from_str(learn([tell(0, number) for number in range(50)], 400).text)


@pytest.fixture(scope="module")
def folder(words: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder as the hub has them: a vocabulary with the special tokens of a template."""

    def written(shape: Shape, source: str | None = None) -> Path:
        place = tmp_path_factory.mktemp("vocabulary")
        library = Library.from_str(words.to_str())
        library.add_special_tokens([AddedToken(x, special=True) for x in shape.special])
        library.save(str(place / "tokenizer.json"))
        said = {"bos_token": shape.bos, "eos_token": shape.eos, "chat_template": shape.source}
        if source is not None:
            said["chat_template"] = source
        (place / "tokenizer_config.json").write_text(json.dumps(said))
        return place

    return written


@pytest.fixture
def prepared(tmp_path: Path, folder: Callable[..., Path]) -> Callable[..., Tokenized]:
    """Prepares rows, each in a long row of its own."""

    def prepare_rows(
        shape: Shape,
        rows: list[dict],
        source: str | None = None,
        checks: Checks | None = None,
        **how: Any,
    ):
        file = tmp_path / "chats.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        data = Data(
            source=jsonl.Source(path=str(file)),
            format=Format(**how),
            length=1024,
            packing="none",
            cache=str(tmp_path / "cache"),
            checks=checks,
        )
        vocabulary = Tokenizer(kind="file", path=str(folder(shape, source)))
        return tokenized(data, vocabulary)

    return prepare_rows


def trained(prepared: Tokenized, number: int = 0) -> list[str]:
    """The text of each run of tokens that are trained on, special ones by their names."""
    corpus = prepared.corpora[0]
    span = slice(corpus.offsets[number], corpus.offsets[number + 1])
    assert corpus.weights is not None
    library = Library.from_str(prepared.vocabulary.text)
    runs: list[list[int]] = [[]]
    for token, weight in zip(corpus.tokens[span].tolist(), corpus.weights[span], strict=True):
        if weight:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [library.decode(run, skip_special_tokens=False) for run in runs if run]


def text_of(prepared: Tokenized, number: int = 0) -> str:
    corpus = prepared.corpora[0]
    tokens = corpus.tokens[corpus.offsets[number] : corpus.offsets[number + 1]]
    library = Library.from_str(prepared.vocabulary.text)
    return library.decode(tokens.tolist(), skip_special_tokens=False)


def theirs(folder: Path, messages: list[dict], **variables: Any) -> str:
    """What transformers makes of a conversation."""
    reference = PreTrainedTokenizerFast.from_pretrained(str(folder))
    text = reference.apply_chat_template(messages, tokenize=False, **variables)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("begin", [[], [SYSTEM]], ids=["plain", "system"])
def test_the_words_of_the_assistant_and_its_stops_are_trained_on_and_nothing_else(
    name: str, begin: list, prepared: Callable, folder: Callable
):
    shape = SHAPES[name]
    messages = [*begin, *PLAIN]
    found = prepared(shape, [{"messages": messages}])
    assert text_of(found) == theirs(folder(shape), messages)
    first, last = (one["content"] for one in messages if one["role"] == "assistant")
    if name in ("llama3", "gemma"):
        last = last.strip()
    if name == "mistral":  # which writes a space where its prompt ends
        first, last = f" {first}", f" {last}"
    if name == "qwen3":  # which leaves the thought to the model
        last = f"{EMPTY}{last}"
    assert trained(found) == [f"{first}{shape.stop}", f"{last}{shape.stop}"]


CODE = "    def f(x):\n\treturn x"


@pytest.mark.parametrize("shape", [*SHAPES.values(), HARMONY], ids=[*SHAPES, "harmony"])
def test_a_model_learns_to_write_all_that_stands_behind_the_default_prompt_of_transformers(
    shape: Shape, prepared: Callable, folder: Callable
):
    place = folder(shape)
    source = re.sub(r"strftime_now\(.*?\)", "'2024-07-26'", shape.source)
    for content in ("Good day.", CODE, "世界 👩‍👩‍👧‍👦"):
        messages = [PLAIN[0], {"role": "assistant", "content": content}]
        prompt, whole = (
            theirs(place, some, chat_template=source, add_generation_prompt=some != messages)
            for some in (messages[:1], messages)
        )
        found = prepared(shape, [{"messages": messages}], source)
        assert text_of(found) == whole
        if shape is DEEPSEEK:  # whose answers have no thought, while its prompt opens one
            assert not whole.startswith(prompt)
            prompt = prompt.removesuffix("<think>\n")
        said = whole.removeprefix(prompt)
        assert trained(found) == [said[: said.index(shape.stop) + len(shape.stop)]]


CALLS = [
    {"role": "user", "content": "How warm is it in Bern?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "warmth", "arguments": {"place": "Bern"}}}
        ],
    },
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "It is 12 degrees."},
]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (
            "qwen2.5",
            '<tool_call>\n{"name": "warmth", "arguments": {"place": "Bern"}}\n</tool_call>',
        ),
        ("qwen3", '<tool_call>\n{"name": "warmth", "arguments": {"place": "Bern"}}\n</tool_call>'),
        ("llama3", '{"name": "warmth", "parameters": {"place": "Bern"}}'),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>warmth\n```json\n"
            '{"place": "Bern"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
    ],
)
def test_a_call_is_trained_on_whole_and_what_the_tool_answers_is_not(
    name: str, call: str, prepared: Callable, folder: Callable
):
    shape = SHAPES[name]
    found = prepared(shape, [{"messages": CALLS}])
    empty = EMPTY if name == "qwen3" else ""
    assert trained(found) == [f"{call}{shape.stop}", f"{empty}It is 12 degrees.{shape.stop}"]
    arguments = json.dumps({"place": "Bern"})
    written = json.loads(json.dumps(CALLS))
    if shape is DEEPSEEK:  # which adds text to text
        written[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert text_of(found) == theirs(folder(shape), written)
    # As others write it, the arguments are the text of an object.
    written[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert text_of(prepared(shape, [{"messages": written}])) == text_of(found)
    # As tables hold calls that have a name themselves.
    if name == "qwen2.5":
        written[1]["tool_calls"] = [{"function": None, "name": "warmth", "arguments": arguments}]
        assert text_of(prepared(shape, [{"messages": written}])) == text_of(found)


NUMBERS: list[Any] = [{}, {"row": 3}, {"rows": [1, 2.5], "all": True, "beside": None}]


def calling(arguments: Any, **beside: Any) -> list[dict]:
    """A conversation with a call of some arguments, and its result."""
    function = {"name": "warmth", "arguments": arguments}
    call = {"tool_calls": [{"type": "function", "function": function}]}
    return [CALLS[0], {"role": "assistant", "content": "", **call, **beside}, *CALLS[2:]]


@pytest.mark.parametrize("arguments", NUMBERS, ids=["none", "number", "several"])
@pytest.mark.parametrize(
    "shape", [QWEN25, QWEN3, LLAMA3, HARMONY], ids=["qwen2.5", "qwen3", "llama3", "harmony"]
)
def test_a_call_without_text_in_its_arguments_is_written_and_trained_on_like_any_other(
    shape: Shape, arguments: Any, prepared: Callable, folder: Callable
):
    source = re.sub(r"strftime_now\(.*?\)", "'2024-07-26'", shape.source)
    thought = {"thinking": "Look."} if shape in (QWEN3, HARMONY) else {}
    for beside in ({}, thought):
        messages = calling(arguments, **beside)
        aliased = [one | {"reasoning_content": "Look."} for one in messages[1:2] if beside]
        found = prepared(shape, [{"messages": messages}], source)
        expected = [messages[0], *(aliased or messages[1:2]), *messages[2:]]
        assert text_of(found) == theirs(folder(shape), expected, chat_template=source)
        call, answer = trained(found)
        assert json.dumps(arguments) in call and "warmth" in call and "12" not in call
        assert ("Look." in call) == bool(beside) and "It is 12 degrees." in answer


def test_a_call_that_cannot_be_found_in_the_text_is_refused_for_that_reason(
    prepared: Callable, tmp_path: Path
):
    source = QWEN25.source.replace(
        "{{- tool_call.name }}", "{{- tool_call.name | upper | length }}"
    )
    source = source.replace("tool_call.arguments | tojson", "tool_call.arguments | length")
    messages = calling({"row": 3}, content="Wait.")
    with pytest.raises(UserError) as refused:
        prepared(QWEN25, [{"messages": messages}], source)
    assert str(refused.value) == (
        f"{tmp_path}/chats.jsonl line 1 is no chat that the template can write: it writes the "
        "calls of message 2, of the assistant, in a way that hides where they are in its text"
    )


def test_channels_that_a_model_opens_itself_are_trained_on(prepared: Callable):
    thought = {"thinking": "Look."}
    messages = [PLAIN[0], PLAIN[1] | thought, CALLS[0], CALLS[1] | thought, *CALLS[2:]]
    look = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
    assert trained(prepared(HARMONY, [{"messages": messages}])) == [
        "<|channel|>final<|message|>Good day, how can I help?<|end|>",
        f"{look} to=functions.warmth<|channel|>commentary json<|message|>"
        '{"place": "Bern"}<|call|>',
        "<|channel|>final<|message|>It is 12 degrees.<|return|>",
    ]
    (row,) = [{"messages": [*PLAIN[:3], PLAIN[3] | thought]}]
    assert trained(prepared(HARMONY, [row]))[-1] == (
        f"{look}<|channel|>final<|message|> It, it.\nDone. <|return|>"
    )


def thoughtful(name: str, thought: str) -> list[dict]:
    """A conversation in which the assistant thinks twice, in one of the ways to say so."""
    inside = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nSix."}
    beside = {"role": "assistant", "content": "Six.", name: thought}
    answer = inside if name == "content" else beside
    ask = {"role": "user", "content": "3 + 3"}
    return [ask, answer, ask, answer]


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning", "thinking"])
def test_thoughts_that_a_template_drops_are_not_looked_for_and_those_it_keeps_are_trained_on(
    name: str, prepared: Callable, folder: Callable
):
    messages = thoughtful(name, "3 and 3 are Six. Six.")
    kept = "<think>\n3 and 3 are Six. Six.\n</think>\n\nSix.<|im_end|>"
    found = prepared(QWEN3, [{"messages": messages}])
    assert trained(found) == ["Six.<|im_end|>", kept]
    assert text_of(found) == theirs(folder(QWEN3), messages)
    dropped = prepared(DEEPSEEK, [{"messages": messages}])
    blanks = "\n\n" if name == "content" else ""  # which it leaves of the content
    assert trained(dropped) == [f"{blanks}Six.{DEEPSEEK.stop}"] * 2


@pytest.mark.parametrize("shape", [QWEN3, DEEPSEEK, QWEN25], ids=["qwen3", "deepseek", "qwen2.5"])
def test_thinking_puts_the_thought_where_the_template_would_not(shape: Shape, prepared: Callable):
    rows = [{"messages": thoughtful("content", "Count.")}]
    full, empty = "<think>\nCount.\n</think>\n\n", "<think>\n\n</think>\n\n"
    # A prompt of DeepSeek's opens the thought, which is then not for the model to do.
    opened = full.removeprefix("<think>\n") if shape is DEEPSEEK else full
    on, off = (prepared(shape, rows, thinking=way) for way in ("on", "off"))
    both = prepared(shape, rows, thinking="both")
    first = trained(on)[0]
    assert trained(on) == [first, f"{opened}Six.{shape.stop}"]
    assert trained(off) == [first, f"Six.{shape.stop}"]
    assert text_of(on).count(full + "Six.") == 1 + (shape is QWEN25)
    assert text_of(off).count(empty + "Six.") == 1 and empty not in text_of(on)
    assert [text_of(both, 0), text_of(both, 1)] == [text_of(off), text_of(on)]
    # A row is held out with all that was made of it.
    assert both.corpora[0].rows == 1 and both.corpora[0].documents == 2


def test_an_empty_thought_is_trained_on_where_the_prompt_leaves_it_to_the_model(
    prepared: Callable,
):
    chats = [{"messages": PLAIN[:2]}, {"messages": thoughtful("reasoning", "Count.")}]
    for shape, begin in ((QWEN3, "<think>\n"), (DEEPSEEK, ""), (QWEN25, "<think>\n")):
        found = prepared(shape, chats, thinking="empty")
        assert trained(found) == [f"{begin}\n</think>\n\nGood day, how can I help?{shape.stop}"]
        assert trained(found, 1)[-1] == f"{begin}Count.\n</think>\n\nSix.{shape.stop}"
        assert f"<think>\n\n</think>\n\n{PLAIN[1]['content']}" in text_of(found)
        assert len(found.corpora[0].notes) == 1  # nothing but what the examples look like
    code = [PLAIN[0], {"role": "assistant", "content": f"<think>\nHm.\n</think>\n\n{CODE}"}]
    found = prepared(QWEN3, [{"messages": code}], thinking="off")
    assert trained(found) == [f"{CODE}<|im_end|>"]


@pytest.mark.parametrize(
    ("shape", "thinking", "message"),
    [
        (
            QWEN3,
            "off",
            '"<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n", and the default prompt of the '
            'chat template ends in "<|im_start|>assistant\\n", behind which the model learns '
            "nothing; windlass chat --thinking off prompts as these, data.format.thinking=empty "
            "trains what the default asks for",
        ),
        (
            DEEPSEEK,
            "none",
            '"<｜Assistant｜>", and the default prompt of the chat template ends in '
            '"<｜Assistant｜><think>\\n", behind which the model learns nothing; '
            "data.format.thinking=empty trains what the default asks for",
        ),
        (
            QWEN3._replace(source=QWEN3.source.replace("enable_thinking is defined and", "not")),
            "on",
            '"<|im_start|>assistant\\n", and the default prompt of the chat template ends in '
            '"<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n", behind which the model learns '
            "nothing; windlass chat --thinking on prompts as these, data.format.thinking=off "
            "trains what the default asks for",
        ),
    ],
    ids=["off", "dropped", "on"],
)
def test_training_behind_another_prompt_than_the_default_one_is_warned_of(
    shape: Shape, thinking: str, message: str, prepared: Callable, tmp_path: Path
):
    rows = [{"messages": thoughtful("reasoning", "Count.")}] * 2
    _, warning = prepared(shape, rows, thinking=thinking).corpora[0].notes
    where = f"{tmp_path}/chats.jsonl line 1"
    assert warning == f"2 of 2 rows, from {where}, train answers behind {message}"
    # Of both, the one is what the default prompt asks for.
    assert len(prepared(QWEN3, rows, thinking="both").corpora[0].notes) == 1


def test_a_hash_of_the_row_chooses_how_it_thinks(prepared: Callable):
    rows = [{"prompt": f"{n} + 1", "completion": "x", "reasoning": f"Of {n}."} for n in range(30)]
    ways = [prepared(QWEN3, rows, thinking=way) for way in ("none", "off", "on")]
    found = prepared(QWEN3, rows, thinking="all")

    def masked(way: Tokenized, number: int) -> tuple[str, list[float]]:
        corpus = way.corpora[0]
        assert corpus.weights is not None
        begin, end = corpus.offsets[number : number + 2]
        return text_of(way, number), corpus.weights[begin:end].tolist()

    each = [[masked(way, n) for way in ways].index(masked(found, n)) for n in range(30)]
    assert all(5 <= each.count(way) <= 15 for way in range(3))
    turned = prepared(QWEN3, rows[::-1], thinking="all")
    assert [text_of(turned, n) for n in range(30)] == [text_of(found, 29 - n) for n in range(30)]
    bare = [{name: one[name] for name in ("prompt", "completion")} for one in rows]
    assert prepared(QWEN3, bare, thinking="all").corpora[0].documents == 30


def test_both_documents_of_a_row_are_in_the_same_split(prepared: Callable):
    rows = [{"prompt": f"{n} + 1", "completion": "x", "reasoning": f"Of {n}."} for n in range(20)]
    found = prepared(QWEN3, rows, thinking="both")
    corpus = found.corpora[0]
    assert corpus.owner is not None and corpus.owner.tolist() == [n // 2 for n in range(40)]
    parts = prepare(replace(found.data, validation=0.3), Tokenizer(kind="file", path=_files(found)))
    held_out = parts.split("validation")
    assert isinstance(held_out, Sequences)
    assert held_out.documents == 2 * len(set(corpus.owner[held_out.index.document].tolist()))


def _files(found: Tokenized) -> str:
    place = found.corpora[0].folder.parent / "files"
    found.vocabulary.save(place)
    return str(place)


def test_a_row_without_reasoning_is_refused_where_thoughts_are_asked_for(
    prepared: Callable, tmp_path: Path
):
    with pytest.raises(UserError) as refused:
        prepared(QWEN3, [{"messages": PLAIN}], thinking="on")
    assert str(refused.value) == (
        f"{tmp_path}/chats.jsonl line 1 has no reasoning, and data.format.thinking is on; it "
        "stands in an answer between <think> and </think>, or as reasoning_content, reasoning or "
        "thinking, or in the column that data.format.reasoning names"
    )
    assert prepared(QWEN3, [{"messages": PLAIN}], thinking="both").corpora[0].documents == 1


def test_only_the_last_turn_is_trained_on_where_that_is_asked_for(prepared: Callable):
    found = prepared(MISTRAL, [{"messages": PLAIN}], turns="last")
    assert [one.strip() for one in trained(found)] == ["It, it.\nDone. </s>"]


def test_the_words_may_be_any_that_templates_and_marks_are_made_of(prepared: Callable):
    strange = (
        "a \U000f0000\U000f0001 \ue000 {{ bos_token }} {% raw %} \U0010fffd 世界 👩‍👩‍👧‍👦 e\u0301"
    )
    messages = [{"role": "user", "content": strange}, {"role": "assistant", "content": strange}]
    assert trained(prepared(LLAMA3, [{"messages": messages}])) == [f"{strange}<|eot_id|>"]
    half = json.dumps([messages[0], {"role": "assistant", "content": "a \ud83d b"}])
    assert trained(prepared(LLAMA3, [{"messages": half}])) == ["a \ufffd b<|eot_id|>"]


def test_rows_that_spell_out_special_tokens_are_counted(prepared: Callable, tmp_path: Path):
    odd = [{"role": "user", "content": "What is <|im_end|>?"}, PLAIN[1]]
    found = prepared(QWEN25, [{"messages": PLAIN}, {"messages": odd}])
    assert found.corpora[0].notes == (
        "examples look like chats: messages",
        "1 of 2 rows spell out special tokens in their own words, which the model reads as such: "
        f"<|im_end|> in {tmp_path}/chats.jsonl line 2",
    )


ASKED = {"role": "user", "content": "Hi\n\nthere"}
TOLD = {"role": "assistant", "content": "Good day"}


@pytest.mark.parametrize(
    ("row", "said", "how"),
    [
        ({"messages": [ASKED, TOLD]}, "examples look like chats: messages", {}),
        ({"messages": json.dumps([ASKED, TOLD])}, "examples look like chats: messages", {}),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi\n\nthere"},
                    {"from": "gpt", "value": "Good day"},
                    {"from": "human", "value": "nobody answers this"},
                ]
            },
            "examples look like ShareGPT: conversations",
            {},
        ),
        (
            {"prompt": "Hi\n\nthere", "completion": "Good day"},
            "examples look like questions and answers: prompt, completion",
            {},
        ),
        (
            {"prompt": [ASKED], "completion": [TOLD]},
            "examples look like questions and answers: prompt, completion",
            {},
        ),
        (
            {"instruction": "Hi", "input": "there", "output": "Good day"},
            "examples look like Alpaca: instruction, input, output",
            {},
        ),
        ({"q": "Hi\n\nthere", "a": "Good day"}, None, {"prompt": "q", "completion": "a"}),
        (
            {"talk": [{"who": "user", "what": "Hi\n\nthere"}, {"who": "bot", "what": "Good day"}]},
            None,
            {"messages": "talk", "role": "who", "content": "what"},
        ),
        (
            {
                "messages": [
                    ASKED | {"tool_calls": None},
                    TOLD | {"content": [{"type": "text", "text": "Good day"}]},
                ]
            },
            "examples look like chats: messages",
            {},
        ),
    ],
    ids="messages json sharegpt prompt messages-both alpaca mapped named parts".split(),
)
def test_rows_are_recognised_by_their_columns_or_mapped(
    row: dict, said: str | None, how: dict, prepared: Callable
):
    found = prepared(QWEN25, [row], **how)
    text = "<|im_start|>user\nHi\n\nthere<|im_end|>\n<|im_start|>assistant\nGood day<|im_end|>\n"
    assert text_of(found).endswith(text)
    assert trained(found) == ["Good day<|im_end|>"]
    assert found.corpora[0].notes == (() if said is None else (said,))


def test_a_system_text_is_put_before_rows_that_have_none(prepared: Callable):
    rows = [
        {"messages": PLAIN},
        {"messages": [SYSTEM, *PLAIN]},
        {"messages": PLAIN, "system": "S."},
    ]
    found = prepared(QWEN25, rows, system="Be kind.")
    begins = [text_of(found, number).split("<|im_end|>")[0] for number in range(3)]
    assert begins == [f"<|im_start|>system\n{text}" for text in ("Be kind.", "Be brief.", "S.")]


def test_tools_of_a_row_reach_the_template(prepared: Callable, folder: Callable):
    tools = [{"type": "function", "function": {"name": "warmth", "description": "<b> & more"}}]
    found = prepared(QWEN25, [{"messages": CALLS, "tools": tools}])
    assert text_of(found) == theirs(folder(QWEN25), CALLS, tools=tools)
    rows = found.split("train")
    assert rows.tokens_per_row < rows.targets_per_row == found.corpora[0].offsets[-1] - 1
    assert "<b> & more" in text_of(found)


@pytest.mark.parametrize(
    ("row", "how", "message"),
    [
        (
            {"messages": [ASKED]},
            {},
            "{where} has no turn of the assistant, whose words are trained on",
        ),
        (
            {"messages": [ASKED, TOLD | {"content": " "}]},
            {},
            "{where} is no chat that the template can write: message 2, of the assistant, is empty",
        ),
        (
            {"messages": []},
            {},
            "{where} has no list of messages in column messages",
        ),
        (
            {"text": "a", "id": 3},
            {},
            "{where} has the columns text and id, and a chat has messages, conversations, prompt "
            "and completion, or instruction and output; data.format.messages, or "
            "data.format.prompt and completion, name other columns",
        ),
        (
            {"prompt": "a", "completion": None},
            {},
            "{where} has null in column completion; its columns are prompt and completion",
        ),
        (
            {"prompt": "a"},
            {"prompt": "prompt", "completion": "answer"},
            "{where} has no column answer; its columns are prompt",
        ),
        (
            {"messages": [{"role": "user", "text": "a"}]},
            {},
            "message 1 of {where} has no content; it has role and text: data.format.role and "
            "data.format.content name the keys of who speaks and what is said",
        ),
        (
            {"messages": [{"role": "narrator", "content": "a"}]},
            {},
            "message 1 of {where} is of narrator; it can be of system, user, assistant, tool, "
            "developer, human, prompter, gpt, chatgpt, bot, model, ai, function_call, observation, "
            "function, function_response or ipython",
        ),
        (
            {"messages": [ASKED | {"content": [{"type": "image"}]}, TOLD]},
            {},
            "message 1 of {where} holds a part of kind image; text alone can be trained on",
        ),
        (
            {"messages": [ASKED | {"content": {"warmth": 20}}, TOLD]},
            {},
            "message 1 of {where} holds a part of kind object; text alone can be trained on",
        ),
        (
            {"messages": [ASKED, TOLD | {"reasoning": ["a"]}]},
            {},
            "message 2 of {where} holds a part of kind str; text alone can be trained on",
        ),
        (
            {"messages": [ASKED, TOLD | {"tool_calls": {"name": "warmth"}}]},
            {},
            "message 2 of {where} has tool_calls that are no list of objects",
        ),
        (
            {"messages": [ASKED, TOLD | {"tool_calls": [{"function": "warmth"}]}]},
            {},
            "message 2 of {where} has a call whose function is no object with a name",
        ),
        (
            {"messages": [ASKED, TOLD | {"tool_calls": [{"function": {"function": 3}}]}]},
            {},
            "message 2 of {where} has a call whose function is no object with a name",
        ),
        (
            {"messages": [ASKED, TOLD], "tools": "a hammer"},
            {},
            "{where} has tools that are no list of objects",
        ),
        (
            {"messages": [ASKED, TOLD], "chat_template_kwargs": {"messages": []}},
            {},
            "{where} has messages in chat_template_kwargs, which no example can set",
        ),
        (
            {"messages": [ASKED, TOLD], "chat_template_kwargs": {"self": 1}},
            {},
            "{where} has self in chat_template_kwargs, which no example can set",
        ),
    ],
    ids=(
        "no-assistant empty none unknown null missing keys role image object thought calls "
        "function nested tools variables self"
    ).split(),
)
def test_a_row_that_is_no_chat_is_refused_with_its_line(
    row: dict, how: dict, message: str, prepared: Callable, tmp_path: Path
):
    with pytest.raises(UserError) as refused:
        prepared(QWEN25, [row], **how)
    assert str(refused.value) == message.format(where=f"{tmp_path}/chats.jsonl line 1")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            ("message.content + '<|im_end|>' + '\\n'", "message.content + '\\n'"),
            "behind message 2, of the assistant, it writes no special token, so that a model would "
            "not learn where to stop",
        ),
        (
            ("+ message.content +", "+ message.content.upper()[1:] +"),
            "it treats the assistant's words in a way that hides where they are in its text",
        ),
        (
            ("{%- for message in messages %}", "{{ messages[9].role }}{%- for m in messages %}"),
            "list object has no element 9",
        ),
        (
            ("{%- for message", "{{- raise_exception('Not today!') }}{%- for message"),
            "Not today!",
        ),
        (
            ("{%- for message", "{{- messages.__class__.__mro__ }}{%- for message"),
            "access to attribute '__class__' of 'list' object is unsafe.",
        ),
        (
            ("{%- for message", "{%- for x in range(10 ** 9) %}x{%- endfor %}{%- for message"),
            "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE "
            "(100000).",
        ),
        (
            ("{%- for message", "{{- 'x' * 10 ** 12 }}{%- for message"),
            "it makes a value of more than 67,108,864 characters",
        ),
    ],
    ids="no-stop changed error raised unsafe endless huge".split(),
)
@pytest.mark.parametrize("count", [2, 4], ids=["one answer", "two answers"])
def test_a_template_that_does_not_do_is_refused_before_training(
    change: tuple[str, str], why: str, count: int, prepared: Callable, tmp_path: Path
):
    source = QWEN25.source.replace(*change)
    assert source != QWEN25.source
    with pytest.raises(UserError) as refused:
        prepared(QWEN25, [{"messages": PLAIN[:count]}], source)
    where = f"{tmp_path}/chats.jsonl line 1"
    assert str(refused.value) == f"{where} is no chat that the template can write: {why}"


def test_a_template_that_is_not_jinja_is_refused_with_its_line(prepared: Callable):
    with pytest.raises(UserError) as refused:
        prepared(QWEN25, [{"messages": PLAIN}], "{% for message in messages %}\n{{ message ")
    assert str(refused.value) == (
        "the chat template is not Jinja: unexpected end of template, expected 'end of print "
        "statement'. at line 2"
    )


def test_a_tokenizer_without_a_template_is_refused_and_one_can_be_named(
    prepared: Callable, tmp_path: Path
):
    bare = QWEN25._replace(source=None)
    with pytest.raises(UserError) as refused:
        prepared(bare, [{"messages": PLAIN}])
    assert str(refused.value) == (
        "data.format is chat, and the tokenizer has no chat template; data.format.template names a "
        "Jinja file or chatml, and an instruct model has one of its own"
    )
    found = prepared(bare, [{"messages": PLAIN}], template="chatml")
    assert trained(found)[0] == "Good day, how can I help?<|im_end|>"
    (tmp_path / "mine.jinja").write_text(QWEN25.source)
    named = prepared(bare, [{"messages": PLAIN}], template=str(tmp_path / "mine.jinja"))
    assert text_of(named) == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + (
        text_of(found)
    )
    assert named.vocabulary.template == QWEN25.source  # what the run keeps, and exports
    with pytest.raises(UserError) as refused:
        prepared(bare, [{"messages": PLAIN}], template="chatmll")
    assert str(refused.value) == (
        "data.format.template is chatmll; it is chatml, or a file with a Jinja template, and there "
        "is no file chatmll"
    )


def test_a_first_row_that_is_no_chat_is_dropped_as_any_other(prepared: Callable):
    rows = [{"body": "no chat"}, {"messages": PLAIN}]
    found = prepared(QWEN25, rows, checks=Checks(offending="drop"))
    assert found.corpora[0].checked.rows == 2 and len(trained(found)) == 2
    with pytest.raises(UserError) as refused:
        prepared(QWEN25, rows)
    assert "1 of 2 examples of data.source cannot be trained on" in str(refused.value)


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_is_what_transformers_makes_of_it_and_stops_where_answers_do(
    name: str, folder: Callable
):
    place = folder(SHAPES[name])
    vocabulary = load(str(place))
    template = vocabulary.chat
    assert isinstance(template, Template)
    expected = theirs(place, PLAIN[:3], add_generation_prompt=True)
    assert chat_prompt(PLAIN[:3], template) == expected
    ids = PreTrainedTokenizerFast.from_pretrained(str(place)).apply_chat_template(
        PLAIN[:3], add_generation_prompt=True, return_dict=False
    )
    assert vocabulary.read(expected).tolist() == ids
    assert {*vocabulary.read(SHAPES[name].stop), vocabulary.eos} <= vocabulary.stops
    bare = chat_prompt(PLAIN[:3], template, "off")
    assert bare.endswith("<think>\n\n</think>\n\n") and bare.count("<think>") == 1


def test_what_is_not_trained_on_is_dimmed_and_the_share_is_told(prepared: Callable):
    found = prepared(QWEN25, [{"messages": PLAIN}, {"messages": PLAIN[:2]}])
    shown = row(found.split("train"), 1, found.vocabulary)
    bright = [shown.plain[x.start : x.end] for x in shown.spans if x.style in COLORS]
    assert bright == ["Good day, how can I help?", "<|im_end|>"]
    rows = found.split("train")
    console = Console(file=io.StringIO(), width=120)
    console.print(table(found))
    told = console.file.getvalue().splitlines()[3]  # pyright: ignore[reportAttributeAccessIssue]
    cells = [cell.strip() for cell in told.strip("│").split("│")]
    weights = [rows[number]["weight"] for number in range(2)]
    places = [rows[number]["document"] >= 0 for number in range(2)]
    share = np.sum(weights) / np.sum(places)
    assert cells[3:] == [f"{np.sum(places)}", f"{np.sum(places) / 2048:.1%}", f"{share:.1%}"]
    assert rows.tokens == np.sum(weights)


def test_a_saved_tokenizer_chats_as_before_in_transformers_too(folder: Callable, tmp_path: Path):
    place = folder(LLAMA3)
    said = json.loads((place / "tokenizer_config.json").read_text())
    kept = {**said, "model_max_length": 777, "auto_map": {"AutoTokenizer": "code.py"}}
    (place / "tokenizer_config.json").write_text(json.dumps(kept))
    library = Library.from_file(str(place / "tokenizer.json"))
    end = library.token_to_id("<|eom_id|>")
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    first = load(str(place))
    first.save(tmp_path / "kept")
    again = load(str(tmp_path / "kept"))
    names = ("text", "eos", "bos", "template", "ends")
    assert all(getattr(again, name) == getattr(first, name) for name in names)
    assert again.stops == {again.eos, end, library.token_to_id("<|eot_id|>")}
    assert theirs(tmp_path / "kept", PLAIN) == theirs(place, PLAIN)
    config = json.loads((tmp_path / "kept/tokenizer_config.json").read_text())
    assert config["model_max_length"] == 777 and "auto_map" not in config


def test_a_template_is_read_from_each_place_that_files_have_it(folder: Callable):
    place = folder(QWEN25)
    config = place / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": several}))
    tokens = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}
    (place / "special_tokens_map.json").write_text(json.dumps(tokens))
    found = load(str(place))
    assert (found.template, found.name(found.eos)) == ("D", "<|im_end|>")
    assert found.chat is not None and found.chat.variables["bos_token"] == "<|im_start|>"
    (place / "chat_template.jinja").write_text("J")
    assert load(str(place)).template == "J"


def test_a_second_start_reads_the_cache_and_another_template_does_not(
    prepared: Callable, tmp_path: Path
):
    rows = [{"messages": PLAIN}]
    first = prepared(QWEN25, rows)
    again = prepared(QWEN25, rows)
    assert again.corpora[0].folder == first.corpora[0].folder
    first.vocabulary.save(tmp_path / "run")
    resumed = tokenized(first.data, Tokenizer(kind="file", path=str(tmp_path / "run")))
    assert resumed.corpora[0].folder == first.corpora[0].folder
    other = prepared(QWEN25, rows, template="chatml")
    assert other.corpora[0].folder != first.corpora[0].folder
    assert other.fingerprint != first.fingerprint
    last = prepared(QWEN25, rows, turns="last")
    assert last.fingerprint != first.fingerprint


def test_text_in_the_cache_has_the_template_of_who_asks_for_it(folder: Callable, tmp_path: Path):
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    source = jsonl.Source(path=str(tmp_path / "text.jsonl"))
    data = Data(source=source, length=8, cache=str(tmp_path / "cache"))
    for template in ("one", "two"):
        asked = Tokenizer(kind="file", path=str(folder(QWEN25, template)))
        assert tokenized(data, asked).vocabulary.template == template


def test_a_line_that_is_not_json_is_refused_with_its_number(prepared: Callable, tmp_path: Path):
    found = prepared(QWEN25, [{"messages": PLAIN}])
    file = tmp_path / "broken.jsonl"
    file.write_text(json.dumps({"messages": PLAIN}) + '\n{"messages": [}\n')
    data = replace(found.data, source=jsonl.Source(path=str(file)))
    with pytest.raises(UserError) as refused:
        prepare(data, Tokenizer(kind="file", path=_files(found)))
    assert str(refused.value) == (
        "1 of 2 examples of data.source cannot be trained on:\n  format: 1 example\n"
        f"    {file} line 2 is not JSON (Expecting value at column 15); one JSON object to a line "
        "is expected\ndata.checks.offending=drop leaves them out"
    )
    file.write_text("")
    data = replace(found.data, source=jsonl.Source(path=str(file)))
    with pytest.raises(UserError) as refused:
        prepare(data, Tokenizer(kind="file", path=_files(found)))
    assert str(refused.value) == f"data.source.path is {file}, which has no documents"


def test_rows_that_are_all_too_long_are_refused(prepared: Callable):
    found = prepared(QWEN25, [{"messages": PLAIN}])
    with pytest.raises(UserError) as refused:
        prepare(replace(found.data, length=16), Tokenizer(kind="file", path=_files(found)))
    assert str(refused.value) == (
        "data.length is 16, and all 1 documents of data.source are longer, the shortest of "
        f"{found.split('train').targets} tokens; a longer row, or data.longer=cut or split would do"
    )
    with pytest.raises(UserError) as refused:
        cut = replace(found.data, length=16, longer="cut")
        prepare(cut, Tokenizer(kind="file", path=_files(found)))
    assert str(refused.value) == (
        "data.length is 16, and what is trained on in the train documents of data.source stands "
        "behind that, where they are cut; a longer row, or data.longer=split would do"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": "a", "prompt": "b", "completion": "c"},
            "messages is given, and prompt too; leave one of them out",
        ),
        ({"prompt": "b"}, "completion is missing; prompt needs it"),
        ({"completion": "b"}, "prompt is missing; completion needs it"),
    ],
)
def test_columns_that_do_not_go_together_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError) as refused:
        Format(**fields)
    assert str(refused.value) == message


def test_a_block_for_what_is_generated_changes_nothing(prepared: Callable, folder: Callable):
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% continue %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    found = prepared(QWEN25, [{"messages": PLAIN}], source)
    assert text_of(found) == theirs(folder(QWEN25, source), PLAIN)
    assert trained(found)[0] == "Good day, how can I help?<|im_end|>"


def test_rows_are_rendered_as_of_one_day(prepared: Callable):
    text = text_of(prepared(HARMONY, [{"messages": PLAIN}]))
    assert text.startswith("<|start|>system<|message|>Today 2024-07-26<|end|>")
