"""Pictures and captions on disk -> buckets of one shape each, read on demand."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from . import emoji
from .buckets import Bucket, PictureSource, nearest_bucket, read_picture, warn_unreadable
from .classes import emoji_labels
from .clips import open_videos
from .config import VIDEO_KINDS, DataConfig
from .moving_emoji import open_moving_emoji
from .picture_files import check_path, list_pictures


def open_source(
    config: DataConfig,
    latent_factor: int,
    seed: int,
    by_class: bool = False,
    frame_factor: int | None = None,
    device: torch.device | None = None,
) -> PictureSource:
    """The recipe's data set.

    Args:
        latent_factor: pixels per latent token; sizes are multiples of it.
        seed: of the emoji set's backgrounds and compositions.
        by_class: the captions are the names of the pictures' classes.
        frame_factor: frames per latent frame, of a model of videos.
        device: where clips of moving emoji are drawn; None: the GPU when there is one.

    Raises:
        ValueError: no such path, no pictures, bad captions.jsonl (names the line), size not a multiple of the factor.
    """
    if (config.kind in VIDEO_KINDS) != (frame_factor is not None):
        wanted = (
            '"videos" or "moving-emoji" with data.sizes'
            if frame_factor is not None
            else '"folder" or "emoji"'
        )
        raise ValueError(
            f"recipe: data.kind = {config.kind!r} is not for a model of "
            f"{'pictures' if frame_factor is None else 'videos'}; write {wanted}"
        )
    if frame_factor is not None:
        check_path(config)
        if config.kind == "moving-emoji":
            source = open_moving_emoji(config, seed, latent_factor, frame_factor, device)
        else:
            source = open_videos(config, latent_factor, frame_factor)
        return mirrored(source) if config.flip else source
    if config.size % latent_factor:
        raise ValueError(
            f"recipe: data.size = {config.size} is not a multiple of {latent_factor}, the pixels per token "
            f"of this pipeline; write {max(1, round(config.size / latent_factor)) * latent_factor}"
        )
    check_path(config)
    if config.kind == "folder":
        source = open_folder(config, latent_factor, by_class)
    else:
        source = open_emoji(config, seed, by_class)
    return mirrored(source) if config.flip else source


def mirrored(source: PictureSource) -> PictureSource:
    """The same set, with every picture mirrored behind the pictures as they are."""

    def both(bucket: Bucket) -> Bucket:
        count = len(bucket.captions)

        def read(indices: list[int]) -> tuple[torch.Tensor, list[int]]:
            plain = [i for i in indices if i < count]
            turned = [i - count for i in indices if i >= count]
            parts, kept = [], []
            for numbers, shift in ((plain, 0), (turned, count)):
                if numbers:
                    pictures, readable = bucket.read(numbers)
                    parts.append(pictures.flip(-1) if shift else pictures)
                    kept += [i + shift for i in readable]
            return torch.cat(parts), kept

        return Bucket(bucket.height, bucket.width, [*bucket.captions, *bucket.captions], read)

    fingerprint = hashlib.sha256(f"mirrored {source.fingerprint}".encode()).hexdigest()
    return PictureSource(lambda: [both(bucket) for bucket in source.open()], fingerprint)


def open_emoji(config: DataConfig, seed: int, by_class: bool = False) -> PictureSource:
    """The emoji set: sprites on coloured backgrounds and composed scenes, made in memory."""
    arguments = {
        "split": config.split, "size": config.size, "seed": seed, "backgrounds": config.backgrounds,
        "compositions": config.compositions, "tag_captions": config.tag_captions and not by_class,
    }  # fmt: skip
    labels = {"label": config.label} if by_class else {}
    with open(config.path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(arguments | labels).encode())
    for module in sorted(Path(emoji.__file__).parent.glob("emoji*.py")):
        digest.update(module.read_bytes())  # another way to compose is another data set

    def make() -> list[Bucket]:
        images, texts = emoji.materialise(config.path, **arguments)
        if by_class:
            each = 1 + config.backgrounds
            texts = [
                label for label in emoji_labels(config.path, config.label, config.split) for _ in range(each)
            ]
        captions = [[text] if isinstance(text, str) else list(text) for text in texts]

        def read(indices: list[int]) -> tuple[torch.Tensor, list[int]]:
            return images[indices[0] : indices[-1] + 1], indices

        return [Bucket(config.size, config.size, captions, read)]

    return PictureSource(make, digest.hexdigest())


def bucket_sizes(config: DataConfig, latent_factor: int) -> list[tuple[int, int]]:
    """(height, width) of every bucket: one square, or Diffusers' ladder of aspect ratios at this pixel budget."""
    if not config.buckets:
        return [(config.size, config.size)]
    from diffusers.training_utils import generate_aspect_ratio_buckets

    return generate_aspect_ratio_buckets(config.size, divisibility=latent_factor)


def open_folder(config: DataConfig, latent_factor: int, by_class: bool = False) -> PictureSource:
    """A user's own pictures. Unreadable ones are named in a warning and left out; ValueError when none is left."""
    root = Path(config.path)
    if not root.is_dir():
        raise ValueError(f"recipe: data.path = {config.path!r} is not a folder; give a folder of images")
    sizes = bucket_sizes(config, latent_factor)
    members: list[list[tuple[Path, list[str]]]] = [[] for _ in sizes]
    digest = hashlib.sha256(json.dumps([sizes, "" if by_class else config.template]).encode())
    unreadable = []
    for path, captions in list_pictures(root, config.template, by_class):
        try:
            with Image.open(path) as image:
                width, height = image.size
                if image.getexif().get(0x0112, 1) >= 5:  # EXIF orientations 5 to 8 lie on their side
                    width, height = height, width
        except OSError:  # PIL's "cannot identify image" is one
            unreadable.append(path)
            continue
        members[nearest_bucket(height, width, sizes)].append((path, captions))
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        digest.update(json.dumps([str(path.relative_to(root)), captions]).encode())
    if not any(members):
        raise ValueError(
            f"none of the {len(unreadable)} pictures in {root} can be read, first {unreadable[0]}; "
            "convert them to PNG or JPEG"
        )
    warn_unreadable(unreadable)
    buckets = [
        _folder_bucket(height, width, group)
        for (height, width), group in zip(sizes, members, strict=True)
        if group
    ]
    return PictureSource(lambda: buckets, digest.hexdigest())


def _folder_bucket(height: int, width: int, group: list[tuple[Path, list[str]]]) -> Bucket:
    def read(indices: list[int]) -> tuple[torch.Tensor, list[int]]:
        pictures, kept, unreadable = [], [], []
        for index in indices:
            try:
                pictures.append(read_picture(group[index][0], height, width))
                kept.append(index)
            except (OSError, SyntaxError, ValueError):  # what PIL raises for files cut short or broken inside
                unreadable.append(group[index][0])
        warn_unreadable(unreadable)
        stacked = np.stack(pictures) if pictures else np.empty((0, 3, height, width), np.uint8)
        return torch.from_numpy(stacked), kept

    return Bucket(height, width, [captions for _, captions in group], read)
