import dataclasses
import importlib
import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from windlass.config.sampling import Sampling
from windlass.data.vocabulary import Vocabulary, byte
from windlass.devices.axes import placements
from windlass.evaluation.generate import Generator, until
from windlass.evaluation.sampling import Settings, adjust, draw
from windlass.layers.head import Head
from windlass.layers.kv_cache import KVCache
from windlass.models import qwen3

VOCAB = 320  # more than the byte vocabulary has
EVERYTHING = Sampling(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.2, tokens=24)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return byte()


@pytest.fixture(scope="module")
def model():
    return opinionated(qwen3.Config.tiny())


def opinionated(config):
    """An untrained model with weights so large that some tokens are far more likely than others."""
    config = dataclasses.replace(config, vocab=VOCAB)
    model = eqx.filter_jit(config.init)(jax.random.key(1))
    return jax.tree.map(lambda x: 4 * x, model)


@pytest.fixture(scope="module")
def generator(model, vocabulary) -> Generator:
    return Generator(model, vocabulary)


class Reciter(eqx.Module):
    """A model that goes on with a text it knows by heart, from wherever a prompt ends in it."""

    text: jax.Array
    head: Head

    def __init__(self, text: str):
        # Position 0 is the token that begins a document; the text is followed by the one that ends.
        tokens = [256, *text.encode()]
        self.text = jnp.array(tokens + [256] * (64 - len(tokens)))
        self.head = Head(50 * jnp.eye(VOCAB))

    def __call__(self, batch: dict[str, jax.Array], cache: KVCache | None = None):
        following = self.text[jnp.minimum(batch["position"] + 1, len(self.text) - 1)]
        return jax.nn.one_hot(following, VOCAB), {}, cache


@pytest.fixture(scope="module")
def recite(vocabulary):
    generator = Generator(Reciter(""), vocabulary)

    def one(text: str) -> Generator:
        generator.renew(Reciter(text))
        return generator

    return one


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("temperature", -1.0, "temperature is -1.0; it is 0 or more"),
        ("temperature", float("nan"), "temperature is nan; it is 0 or more"),
        ("top_k", 0, "top_k is 0; it is a number of tokens, 1 or more"),
        ("top_p", 0.0, "top_p is 0.0; it is a share, above 0 and at most 1"),
        (
            "repetition_penalty",
            0.0,
            "repetition_penalty is 0.0; it is above 0, and 1 is none",
        ),
        ("tokens", 0, "tokens is 0; it is 1 or more"),
        ("stop", ("end", ""), "stop holds an empty text, which is found everywhere"),
        ("seed", -1, "seed is -1; it is 0 or more and below 2^32"),
    ],
)
def test_a_sampling_that_means_nothing_is_refused(field, value, message):
    with pytest.raises(ValueError) as refusal:
        Sampling(**{field: value})
    assert str(refusal.value) == message


def test_greedy_text_is_what_full_passes_without_a_cache_give(causal, vocabulary):
    model = opinionated(importlib.import_module(f"windlass.models.{causal}").Config.tiny())
    prompts = ["Once upon a time", "The", ""]
    sampling = Sampling(temperature=0.0, tokens=10)
    texts = Generator(model, vocabulary).generate(prompts, sampling)
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = [256, *prompt.encode()]
        start = len(tokens)
        for _ in range(sampling.tokens):
            row = np.zeros((1, 32), np.int32)
            row[0, : len(tokens)] = tokens
            logits = full_pass(model, jnp.asarray(row))[0, len(tokens) - 1, : vocabulary.size]
            if (token := int(np.argmax(logits))) == vocabulary.eos:
                break
            tokens.append(token)
        assert text == vocabulary.decode(tokens[start:])


@eqx.filter_jit
def full_pass(model, tokens):
    position, document = jnp.arange(tokens.shape[1])[None], jnp.zeros_like(tokens)
    hidden, _, _ = model({"tokens": tokens, "position": position, "document": document})
    return model.head.logits(hidden)


def test_a_stream_is_the_generated_text_in_pieces(generator):
    pieces = list(generator.stream("Ada saw", EVERYTHING))
    assert len(pieces) > 3
    assert "".join(pieces) == generator.generate("Ada saw", EVERYTHING)[0]


def test_a_row_does_not_depend_on_the_others(generator):
    alone = generator.generate(["Ada"], EVERYTHING)
    among = generator.generate(["Ada", "a much longer prompt, for a change, than that"], EVERYTHING)
    others = generator.generate(["Ada", "Tom"], EVERYTHING)
    assert alone[0] == among[0] == others[0]
    assert among[1] != others[1]


def test_rows_and_seeds_draw_differently(generator):
    first = generator.generate(["Ada", "Ada"], EVERYTHING)
    again = generator.generate(["Ada", "Ada"], EVERYTHING)
    other = generator.generate(["Ada", "Ada"], dataclasses.replace(EVERYTHING, seed=1))
    assert first == again
    assert len({*first, *other}) == 4


def test_prompts_in_batches_are_written_on_from_as_they_are_together(generator, caplog):
    prompts = ["Ada", "Tom and his cat", "", "The sea", "Ada"]
    together = generator.generate(prompts, EVERYTHING)
    assert together[0] != together[4]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert list(generator.each(prompts, EVERYTHING, 3)) == together
        assert compiled(caplog) == 2  # the last two prompts take the programs of the first three


def test_the_tokens_of_a_prompt_are_written_on_from_as_its_text_is(generator, vocabulary):
    tokens = np.concatenate([[vocabulary.bos], vocabulary.encode("Ada saw")])
    assert "".join(generator.stream(tokens, EVERYTHING)) == "".join(
        generator.stream("Ada saw", EVERYTHING)
    )


def test_a_text_ends_at_any_token_that_ends_one(vocabulary):
    generator = Generator(Reciter("The sea was calm."), vocabulary, ends=[ord("w")])
    assert generator.generate("The", Sampling()) == [" sea "]
    assert "".join(generator.stream("The", Sampling())) == " sea "


def test_no_prompts_give_no_texts(generator):
    assert generator.generate([], Sampling()) == []


def test_ids_the_vocabulary_does_not_have_are_never_drawn(vocabulary):
    model = eqx.tree_at(lambda m: m.text, Reciter("abc"), replace_fn=lambda text: 0 * text + 300)
    drawn = Generator(model, vocabulary)._columns([np.array([256])], Sampling(tokens=32))
    assert max(int(column[0]) for column in drawn) < vocabulary.size < 300


def test_prompts_of_about_the_same_length_share_two_programs(vocabulary, caplog):
    generator = Generator(Reciter("The sea was calm."), vocabulary)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        list(generator.stream("A short prompt", Sampling(tokens=8)))
        assert compiled(caplog) == 2
        generator.generate(["Another, a little longer"], Sampling(tokens=12, temperature=0.3))
        generator.renew(Reciter("Nobody came."))
        generator.generate(["With other weights"], Sampling(tokens=3, seed=1))
        assert compiled(caplog) == 2
        generator.generate("A prompt that needs a larger cache.", Sampling(tokens=8))
        assert compiled(caplog) == 4


def compiled(caplog) -> int:
    return sum(
        record.getMessage().startswith("Finished XLA compilation of jit(_one_token)")
        for record in caplog.records
    )


def test_a_generator_keeps_to_its_model(generator, model):
    other = eqx.tree_at(lambda m: m.output, model, None)
    with pytest.raises(ValueError) as refusal:
        generator.renew(other)
    assert str(refusal.value) == "a generator can be given other weights, not another model"


@pytest.mark.long
@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param(["Ada"], marks=pytest.mark.long),
        ["Ada", "Tom and his cat", "", "The sea"],
    ],
)
def test_text_is_the_same_on_a_mesh(generator, model, vocabulary, prompts, caplog):
    expected = generator.generate(prompts, EVERYTHING)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh), jax.log_compiles(), caplog.at_level(logging.WARNING):
        weights, rest = eqx.partition(model, eqx.is_array)
        weights = jax.device_put(weights, placements(weights, mesh))
        spread = Generator(eqx.combine(weights, rest), vocabulary)
        assert spread.generate(prompts, EVERYTHING) == expected
        assert compiled(caplog) == 2


def test_a_text_ends_where_the_document_does(recite):
    generator = recite("The sea was calm. Nobody came.")
    assert generator.generate("The sea", Sampling()) == [" was calm. Nobody came."]
    assert "".join(generator.stream("", Sampling())) == "The sea was calm. Nobody came."


def test_a_text_ends_after_so_many_tokens(recite):
    generator = recite("The sea was calm.")
    assert generator.generate("The", Sampling(tokens=4)) == [" sea"]


def test_rows_end_each_in_its_own_place(recite):
    generator = recite("The sea was calm. Nobody came.")
    prompts = ["The", "The sea was calm. Nob", "The sea was calm"]
    sampling = Sampling(stop=("ob", "calm"))
    assert generator.generate(prompts, sampling) == [" sea was ", "ody came.", ". N"]


def test_a_text_ends_before_a_stop_string_that_spans_tokens(recite):
    generator = recite("one, two, three")
    sampling = Sampling(stop=(", th", "xyz"))
    assert generator.generate("one", sampling) == [", two"]
    assert "".join(generator.stream("one", sampling)) == ", two"


def test_what_may_begin_a_stop_string_is_held_back():
    assert list(until(["ab", "c", "ab", "ce"], ["abcd"])) == ["abc", "abce"]
    assert list(until(["x", "ab", "cd", "never"], ["abcd"])) == ["x"]
    assert list(until(["x", "ab"], ["abcd"])) == ["x", "ab"]
    assert list(until(["xyz", "later"], ["z", "y"])) == ["x"]
    assert list(until(["aab"], ["ab"])) == ["a"]
    assert list(until(["a", "b"], [])) == ["a", "b"]


def test_a_stream_never_cuts_a_character(recite):
    text = "naïve café, 海"
    pieces = list(recite(text).stream("na", Sampling()))
    assert "".join(pieces) == text[2:]
    assert not any("\ufffd" in piece for piece in pieces)


def test_words_keep_the_space_before_them_and_need_no_token_that_begins():
    words = ["▁the", "▁sea", "▁was", "▁calm", "<end>"]
    library = Library(models.WordLevel({word: i for i, word in enumerate(words)}, "<end>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<end>"])
    tokens = jnp.array([0, 1, 2, 3, 4])
    model = eqx.tree_at(lambda m: m.text, Reciter(""), tokens)
    generator = Generator(model, Vocabulary(library.to_str(), eos=4, bos=None))
    assert generator.generate("the sea", Sampling()) == [" was calm"]
    assert generator.generate("", Sampling()) == ["sea was calm"]  # the end stands for "the"


def reference(logits, seen, sampling: Sampling) -> np.ndarray:
    """One row after the other, in float64, by the definitions."""
    rows = []
    for row, old in zip(np.asarray(logits, np.float64), seen, strict=True):
        penalty = sampling.repetition_penalty
        row = np.where(old, np.where(row > 0, row / penalty, row * penalty), row)
        row = row / sampling.temperature
        order = np.argsort(-row, kind="stable")[: sampling.top_k]
        share = np.exp(row[order] - row[order[0]])
        before = np.cumsum(share / share.sum()) - share / share.sum()
        kept = order[before < (sampling.top_p or 2)]
        rows.append(np.where(np.isin(np.arange(len(row)), kept), row, -np.inf))
    return np.stack(rows)


SAMPLINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, repetition_penalty=1.7),
    Sampling(temperature=1.0, repetition_penalty=0.6),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=7),
    Sampling(temperature=1.0, top_k=1000),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=0.8, top_k=50, top_p=0.9),
    Sampling(temperature=1.3, top_k=30, top_p=0.8, repetition_penalty=1.2),
]


def example():
    logits = 3 * np.random.default_rng(0).standard_normal((5, 200)).astype(np.float32)
    # The last tokens of a prompt of six, for each row.
    return logits, np.random.default_rng(1).integers(200, size=(5, 6))


def ours(logits, prompt, sampling: Sampling) -> np.ndarray:
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, prompt, True, axis=1)
    return np.asarray(adjust(jnp.asarray(logits), jnp.asarray(seen), Settings.of(sampling)))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_logits_are_adjusted_by_the_definitions(sampling):
    logits, prompt = example()
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, prompt, True, axis=1)
    np.testing.assert_allclose(
        ours(logits, prompt, sampling), reference(logits, seen, sampling), rtol=1e-6
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_logits_are_adjusted_as_transformers_does(sampling):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits, prompt = example()
    steps = [process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    steps += [process.TemperatureLogitsWarper(sampling.temperature)]
    steps += [process.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [process.TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    theirs = process.LogitsProcessorList(steps)(torch.tensor(prompt), torch.tensor(logits))
    np.testing.assert_allclose(ours(logits, prompt, sampling), theirs.numpy(), rtol=1e-6)


def test_top_p_keeps_the_token_that_crosses_the_threshold_in_each_row_by_its_own_shares():
    shares = np.array([[0.05, 0.5, 0.15, 0.3], [0.02, 0.03, 0.91, 0.04], [0.22, 0.26, 0.24, 0.28]])
    logits = jnp.log(jnp.asarray(shares, jnp.float32))
    settings = Settings.of(Sampling(temperature=1.0, top_p=0.7))
    kept = np.asarray(adjust(logits, None, settings)) > -np.inf
    for row, its in zip(shares, kept, strict=True):
        order, total, expected = np.argsort(-row), 0.0, set()
        for token in order:
            expected.add(int(token))
            total += row[token]
            if total >= 0.7:
                break
        assert {*np.flatnonzero(its).tolist()} == expected
    assert kept.sum(axis=1).tolist() == [2, 1, 3]


def test_greedy_takes_the_most_likely_token_after_the_penalty():
    logits = jnp.array([[2.0, 1.9, -1.0]])
    seen = jnp.array([[True, False, False]])
    settings = Settings.of(Sampling(temperature=0.0, repetition_penalty=1.5, top_k=2))
    assert draw(adjust(logits, seen, settings), jnp.int32(0), settings).tolist() == [1]


def test_tokens_are_drawn_as_often_as_they_are_likely():
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.log(jnp.tile(jnp.asarray(shares, jnp.float32), (4000, 1)))
    drawn = draw(logits, jnp.int32(5), Settings.of(Sampling(temperature=1.0)))
    np.testing.assert_allclose(np.bincount(drawn) / 4000, shares, atol=0.03)
