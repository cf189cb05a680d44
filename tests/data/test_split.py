import numpy as np

from windlass.data.split import split

SEEDS = ({}, {"seed": 0}, {"seed": 1}, {"seed": 2})


def test_every_document_is_in_one_split_and_the_shares_are_as_asked():
    parts = split(100_000, validation=0.05, test=0.1)
    joined = np.sort(np.concatenate(list(parts.values())))
    assert joined.tolist() == list(range(100_000))
    assert abs(len(parts["validation"]) - 5_000) < 250
    assert abs(len(parts["test"]) - 10_000) < 350


def test_documents_added_at_the_end_leave_the_others_in_their_split():
    before = split(1000, validation=0.1, test=0.1)
    after = split(1500, validation=0.1, test=0.1)
    for name, documents in before.items():
        assert after[name][after[name] < 1000].tolist() == documents.tolist()


def test_a_larger_share_of_validation_moves_documents_out_of_training_only():
    small, large = (split(1000, validation=share, test=0.1) for share in (0.1, 0.3))
    assert small["test"].tolist() == large["test"].tolist()
    assert set(small["validation"]) < set(large["validation"])


def test_another_seed_holds_out_others_and_seed_0_those_without_one():
    shares = dict(validation=0.1, test=0.1)
    plain, zero, one, two = (split(10_000, **shares, **seed) for seed in SEEDS)
    for name in ("validation", "test"):
        assert plain[name].tolist() == zero[name].tolist()
        for other in (one, two):
            # A tenth of those that one seed holds out is held out by another, by chance.
            shared = np.intersect1d(zero[name], other[name])
            assert 60 < len(shared) < 140
        shifted = np.intersect1d(one[name], two[name] + 1)
        assert len(shifted) < 140


def test_nothing_is_held_out_unless_asked():
    parts = split(1000, validation=0.0, test=0.0)
    assert [len(part) for part in parts.values()] == [1000, 0, 0]
