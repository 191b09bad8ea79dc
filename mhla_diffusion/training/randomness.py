"""Every random choice of training as a function of (seed, step, sample).

Nothing here keeps state: a generator is seeded anew for each step and purpose, and draws for the whole global batch;
each process then takes its rows. So a resumed run, a run on another number of processes, and a twin with another
model see the same data, times and noise.
"""

from __future__ import annotations

import hashlib

import torch

_SIXTY_THREE_BITS = (1 << 63) - 1


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and a purpose; neighbouring inputs give unrelated seeds."""
    text = ":".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _SIXTY_THREE_BITS


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator:
    """A generator on `device` seeded by `derived_seed(*parts)`."""
    return torch.Generator(device).manual_seed(derived_seed(*parts))


def batches_per_epoch(bucket_sizes: list[int], batch_size: int) -> int:
    """Global batches in one epoch: each bucket gives its ceiling, the last batch filled from its own start."""
    return sum(-(-size // batch_size) for size in bucket_sizes)


def epoch_batches(
    bucket_sizes: list[int], batch_size: int, seed: int, epoch: int
) -> tuple[list[int], torch.Tensor]:
    """The order of one epoch.

    Each bucket is permuted and cut into batches (a batch has one shape); a last, short batch is filled by going on
    through the same permutation from its start, so no sample is left out. Then the batches are shuffled.

    Returns:
        the bucket of each batch (a list of ints), and int64 indices `(batches, batch_size)` into that bucket.
    """
    buckets, rows = [], []
    for bucket, size in enumerate(bucket_sizes):
        if size == 0:
            continue
        order = torch.randperm(size, generator=generator("cpu", seed, "order", epoch, bucket))
        count = -(-size // batch_size)
        rows.append(
            order.repeat(-(-count * batch_size // size))[: count * batch_size].view(count, batch_size)
        )
        buckets += [bucket] * count
    shuffle = torch.randperm(len(buckets), generator=generator("cpu", seed, "batches", epoch))
    return [buckets[i] for i in shuffle.tolist()], torch.cat(rows)[shuffle]


class DataOrder:
    """Looks up the global batch of a step; keeps the current epoch's indices on `device`."""

    def __init__(self, bucket_sizes: list[int], batch_size: int, seed: int, device: torch.device | str):
        self.bucket_sizes, self.batch_size, self.seed, self.device = bucket_sizes, batch_size, seed, device
        self.per_epoch = batches_per_epoch(bucket_sizes, batch_size)
        self._epoch = -1

    def __call__(self, step: int) -> tuple[int, torch.Tensor]:
        """Bucket number and `(batch_size,)` int64 indices of global step `step`."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._buckets, indices = epoch_batches(self.bucket_sizes, self.batch_size, self.seed, epoch)
            if torch.device(self.device).type == "cuda":
                indices = indices.pin_memory()  # so that the copy does not wait for the device
            self._indices, self._epoch = indices.to(self.device, non_blocking=True), epoch
        return self._buckets[position], self._indices[position]
