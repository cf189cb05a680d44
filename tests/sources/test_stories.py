import re
from pathlib import Path

import pytest

from windlass.sources import _story_plots, _story_words
from windlass.sources.stories import Source, tell

SAMPLE = [tell(0, index) for index in range(2000)]


def test_a_story_follows_from_its_seed_and_number_alone():
    few, many = Source(count=5, seed=3), Source(count=5000, seed=3)
    backwards = [many[index] for index in reversed(range(5))]
    assert [few[index] for index in range(5)] == backwards[::-1]
    assert many[4999]["text"] == tell(3, 4999)


def test_the_stories_are_these_on_every_machine():
    assert tell(0, 1) == (
        "Mia was a shy girl. She loved to play outside. One cold morning, Mia found a tiny seed in "
        "the tall grass. Mia made a hole, put the seed in it, and gave it water. "
        '"You must be patient," said Grandma. So Mia waited, and every morning she gave it water. '
        "At last, something small and green came up! It grew and grew until it was a pumpkin. "
        "From that day on, Mia was happy."
    )


def test_stories_differ_from_each_other_and_from_those_of_another_seed():
    others = [tell(1, index) for index in range(2000)]
    assert len({*SAMPLE, *others}) == 4000


def test_stories_are_short_and_their_vocabulary_is_small():
    lengths = [len(story.split()) for story in SAMPLE]
    words = {word for story in SAMPLE for word in re.findall("[a-z]+", story.lower())}
    assert min(lengths) >= 60 and max(lengths) <= 120
    assert 400 <= len(words) <= 600


def test_stories_are_whole_sentences():
    for story in SAMPLE:
        assert not re.search(r"[{}<>]|  |\ba [aeiou]|[.!?] [a-z]", story), story
        assert story[0].isupper() and story[-1] == "."
        assert story.count('"') % 2 == 0


def test_nobody_is_both_he_and_she():
    # Where everyone named is of one kind, no word of the other kind may stand.
    people = (*_story_words.HEROES, *_story_words.ELDERS)
    women = {person.name for person in people if person.he == "she"}
    men = {person.name for person in people if person.he == "he"}
    seen = 0
    for story in SAMPLE:
        words = set(re.findall("[A-Za-z]+", story))
        if not words & men:
            assert not {word.lower() for word in words} & {"he", "him", "his"}, story
            seen += 1
        if not words & women and "woman" not in words:
            assert not {word.lower() for word in words} & {"she", "her"}, story
            seen += 1
    assert seen > 500


def test_other_counts_and_seeds_are_other_sources():
    sources = [Source(count=5), Source(count=6), Source(count=5, seed=1)]
    assert len({source.fingerprint() for source in sources}) == 3
    assert Source(count=5).fingerprint() == sources[0].fingerprint()


@pytest.mark.parametrize(
    ("part", "word", "other"),
    [(_story_words, "puppy", "kitten"), (_story_plots, "prize", "medal")],
)
def test_a_grammar_of_other_words_is_another_source(tmp_path, monkeypatch, part, word, other):
    before, file = Source().fingerprint(), tmp_path / "part.py"
    file.write_text(Path(part.__file__).read_text().replace(word, other))
    monkeypatch.setattr(part, "__file__", str(file))
    assert Source().fingerprint() != before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "count is 0; there is at least 1 story"),
        ({"seed": -1}, "seed is -1; it is between 0 and 4294967295"),
    ],
)
def test_refusals(fields: dict, message: str):
    with pytest.raises(ValueError) as refused:
        Source(**fields)
    assert str(refused.value) == message
