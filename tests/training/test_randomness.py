import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion.training.randomness import DataOrder, batches_per_epoch, derived_seed, epoch_batches

sizes = st.lists(st.integers(0, 13), min_size=1, max_size=4).filter(any)


@given(sizes, st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_shows_every_sample(bucket_sizes, batch, seed, epoch):
    buckets, indices = epoch_batches(bucket_sizes, batch, seed, epoch)
    assert indices.shape == (batches_per_epoch(bucket_sizes, batch), batch) and len(buckets) == len(indices)
    for bucket, size in enumerate(bucket_sizes):
        rows = [indices[i] for i, b in enumerate(buckets) if b == bucket]
        seen = torch.cat(rows).tolist() if rows else []
        assert set(seen) == set(range(size))
        counts = [seen.count(i) for i in range(size)]
        assert (
            max(counts, default=0) - min(counts, default=0) <= 1
        )  # filling up repeats none twice before all once


def test_order_is_a_function_of_seed_and_step():
    order, again = DataOrder([7, 5], 4, 1, "cpu"), DataOrder([7, 5], 4, 1, "cpu")
    forward = [order(step) for step in range(9)]
    for step in (8, 3, 0, 5):  # in any order, as after a resume
        bucket, index = again(step)
        assert bucket == forward[step][0] and torch.equal(index, forward[step][1])
    other = [DataOrder([7, 5], 4, 2, "cpu")(step) for step in range(9)]
    assert any(a[0] != b[0] or not torch.equal(a[1], b[1]) for a, b in zip(forward, other, strict=True))
    assert not torch.equal(epoch_batches([64], 64, 0, 0)[1], epoch_batches([64], 64, 0, 1)[1])


@pytest.mark.parametrize("parts", [(0, "noise", 1), (1, "noise", 0), (10, "noise"), (1, "0noise")])
def test_seeds_differ(parts):
    assert derived_seed(*parts) != derived_seed(0, "noise", 0)
    assert 0 <= derived_seed(*parts) < 2**63
