"""Examples in packed rows: nothing lost, nothing parted, an order that is a function of seed and epoch."""

import numpy as np
import pytest

from areal_jax.trainer.examples import CHUNK, Corpus, row_order
from areal_jax.types import Example, TrainingSequence


def example(random, sequences=1):
    def one():
        tokens = random.integers(1, 1000, random.integers(2, 14)).astype(np.int32)
        trained = np.r_[False, random.random(tokens.size - 1) < 0.5]
        return TrainingSequence(tokens, trained)

    return Example(tuple(one() for _ in range(sequences)))


def unpacked(rows):
    """(inputs, targets, learnt) of each sequence, row by row, read from the arrays alone."""
    found = []
    for r in range(rows.tokens.shape[0]):
        for segment in range(1, rows.segment_ids[r].max() + 1):
            (at,) = np.nonzero(rows.segment_ids[r] == segment)
            assert np.array_equal(at, np.arange(at[0], at[-1] + 1)) and np.array_equal(rows.positions[r, at], np.arange(at.size))
            found.append((rows.tokens[r, at].tolist(), rows.targets[r, at].tolist(), rows.loss_mask[r, at].tolist()))
    return found


@pytest.mark.parametrize("sequences", [1, 2])
def test_rows_hold_every_example_once_and_whole(sequences):
    random = np.random.default_rng(0)
    examples = [example(random, sequences) for _ in range(60)]
    corpus = Corpus(examples, 30)
    rows = corpus.rows(range(len(corpus.bins)), len(corpus.bins) + 3, slots=corpus.most if sequences == 2 else 0)
    expected = [
        (s.tokens[:-1].tolist(), s.tokens[1:].tolist(), s.trained[1:].tolist()) for indices in corpus.bins for i in indices for s in examples[i].sequences
    ]
    assert unpacked(rows) == expected and sorted(i for indices in corpus.bins for i in indices) == list(range(60))
    assert rows.segment_ids[-3:].max() == 0 and rows.loss_mask.sum() == corpus.trained_tokens and corpus.efficiency > 0.9
    assert (rows.loss_mask[rows.segment_ids == 0] == 0).all()


def test_pairs_have_their_places_and_references():
    random = np.random.default_rng(1)
    corpus = Corpus([example(random, 2) for _ in range(20)], 60)
    corpus.reference = random.normal(size=(20, 2)).astype(np.float32)
    rows = corpus.rows(range(len(corpus.bins)), len(corpus.bins), slots=corpus.most + 1)
    assert rows.pairs.sum() == 20 and rows.pairs[:, -1].sum() == 0
    for row, indices in enumerate(corpus.bins):
        np.testing.assert_array_equal(rows.reference[row, : len(indices)], corpus.reference[indices])
        assert rows.segment_ids[row].max() == 2 * len(indices) == 2 * rows.pairs[row].sum()


def test_packing_goes_in_pieces():
    random = np.random.default_rng(2)
    corpus = Corpus([example(random) for _ in range(CHUNK + 5)], 30)
    assert all(len({i // CHUNK for i in indices}) == 1 for indices in corpus.bins)


def test_examples_that_do_not_fit_are_refused():
    random = np.random.default_rng(3)
    with pytest.raises(ValueError, match="at least one example"):
        Corpus([], 8)
    with pytest.raises(ValueError, match=r"1 to 1 positions; got one of \d+: raise 'sft\.row_tokens'"):
        Corpus([example(random, 2)], 1)
    with pytest.raises(ValueError, match="got one of 0"):
        Corpus([Example((TrainingSequence(np.array([1], np.int32), np.array([False])),))], 8)


def test_each_row_once_an_epoch_and_a_new_order_in_the_next():
    order = row_order(12, 4, seed=7, epochs=2)
    assert len(order) == 6
    first, second = np.concatenate([order[s] for s in range(3)]), np.concatenate([order[s] for s in range(3, 6)])
    assert sorted(first) == sorted(second) == list(range(12)) and list(first) != list(second)
    assert list(row_order(12, 4, seed=8)[0]) != list(order[0])
    np.testing.assert_array_equal(row_order(12, 5, seed=7)[1], np.concatenate([first, second])[5:10])
    ragged = row_order(5, 4, seed=7, epochs=3)
    assert [len(ragged[s]) for s in range(len(ragged))] == [4, 4, 4, 3]
    endless = row_order(3, 8, seed=7)
    assert [sorted(np.concatenate([endless[s] for s in range(3)])).count(r) for r in range(3)] == [8, 8, 8]
