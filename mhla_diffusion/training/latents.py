"""Encodes pictures, videos and captions once, and keeps the result on disk."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm

from mhla_diffusion.folders import one_at_a_time

from .buckets import Bucket, Captions, PictureSource
from .checkpoint import write_folder
from .components import Components
from .config import DataConfig
from .losses import makes_videos
from .tensor_file import GrowingTensorFile, TensorsInMemory
from .transfer import fetched, upload

Kept = TypeVar("Kept")

_FORMAT = "1"  # part of every cache key; raise it when the encoding or the layout changes


@dataclass
class LatentSet:
    """Per bucket float32 latents of pictures `(K, C, h, w)` or videos `(K, C, frames, h, w)`, and their captions."""

    latents: list[torch.Tensor]
    captions: list[Captions]

    @property
    def sizes(self) -> list[int]:
        return [len(bucket) for bucket in self.latents]


def encode_pixels(vae: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """uint8 `(B, 3, H, W)` or `(B, 3, F, H, W)` -> float32 latents `(B, C, ...)` as the transformer sees them.

    The autoencoder computes in its own dtype, which is float32 as `load_vae` gives it, never under autocast. On CUDA,
    convolutions use TF32 where `torch.backends.cudnn.allow_tf32` says so (torch's default), matrix products where
    `run.tf32` does. Nothing here waits for the device.
    """
    weight = next(vae.parameters())
    images = upload(pixels, weight.device) if pixels.device.type == "cpu" else pixels.to(weight.device)
    encoded = vae.encode((images.float() / 127.5 - 1).to(weight.dtype))
    latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
    mean, std = getattr(vae.config, "latents_mean", None), getattr(vae.config, "latents_std", None)
    if mean is None or std is None:
        return latents.float() * vae.config.scaling_factor
    shape = (1, -1, *[1] * (latents.ndim - 2))
    mean, std = (upload(torch.tensor(x).view(shape), latents.device) for x in (mean, std))
    return (latents.float() - mean) / std


def encode_source(
    source: PictureSource,
    vae: nn.Module,
    batch: int,
    out: GrowingTensorFile | TensorsInMemory,
    unit: str = "picture",
) -> list[Captions]:
    """Encodes every readable picture into `out`, and returns the captions; a broken one is left out, with a warning.

    Bucket after bucket that is not empty is put into `out` as "0", "1", and so on. A GPU is given the next batch while
    it works on the one before, and while that is put away. `unit`: what the progress bar counts.

    Raises ValueError when nothing can be read.
    """
    captions: dict[int, Captions] = {}
    for rows, (number, texts) in fetched(_encoded(source.open(), vae, batch, unit)):
        known = captions.setdefault(number, [])
        known += texts
        out.append(str(len(captions) - 1), rows)
    if not captions:
        raise ValueError("none of the files can be read; convert them to PNG or JPEG, videos to mp4")
    return list(captions.values())


@torch.no_grad()
def _encoded(
    buckets: list[Bucket], vae: nn.Module, batch: int, unit: str
) -> Iterator[tuple[torch.Tensor, tuple[int, Captions]]]:
    """Latents `(n, C, ...)` on the autoencoder's device, the number of their bucket and their captions."""
    total = sum(len(bucket.captions) for bucket in buckets)
    with tqdm(total=total, desc="encoding", unit=unit, disable=None, dynamic_ncols=True) as bar:
        for number, bucket in enumerate(buckets):
            for start in range(0, len(bucket.captions), batch):
                indices = list(range(start, min(start + batch, len(bucket.captions))))
                pixels, kept = bucket.read(indices)
                if kept:
                    yield encode_pixels(vae, pixels), (number, [bucket.captions[i] for i in kept])
                bar.update(len(indices))


def _latent_set(tensors: dict[str, torch.Tensor], captions: list[Captions]) -> LatentSet:
    return LatentSet([tensors[str(i)] for i in range(len(tensors))], captions)


def _read(folder: Path) -> LatentSet:
    captions = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
    return _latent_set(load_file(folder / "latents.safetensors"), captions)


def _vae_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _text_digest(base: Path, texts: list[str], length: int) -> str:
    """Of what the embeddings of captions are made of; the files are large, so their contents are hashed one by one."""
    digest = hashlib.sha256(json.dumps([length, texts]).encode())
    files = [
        path for part in ("tokenizer", "text_encoder") for path in (base / part).iterdir() if path.is_file()
    ]
    for path in sorted(files):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _kept(folder: Path, read: Callable[[Path], Kept], fill: Callable[[Path], None], what: str) -> Kept:
    """What `read` finds in a folder of the cache, which `fill` makes where there is none, or a broken one.

    Processes that want the same folder wait until the first of them has filled it.
    """

    def found(warn: bool) -> Kept | None:
        if not folder.is_dir():
            return None
        try:
            return read(folder)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            if warn:
                warnings.warn(f"the {what} in {folder} cannot be read ({error}); encoding anew", stacklevel=4)
            return None

    kept = found(warn=True)  # without the lock: a cache may be one that nobody can write into
    if kept is None:
        with one_at_a_time(folder.with_name(f".{folder.name}.lock")):
            kept = found(warn=False)
            if kept is None:
                write_folder(folder, fill)
                kept = read(folder)
    return kept


def load_or_encode(
    source: PictureSource, parts: Components, config: DataConfig, device: torch.device
) -> LatentSet:
    """The encoded data set, from the cache when the autoencoder, the data and the settings are the same."""
    key = hashlib.sha256(
        f"{_FORMAT}:{_vae_digest(parts.base / 'vae')}:{source.fingerprint}".encode()
    ).hexdigest()[:32]
    unit = "clip" if makes_videos(parts.transformer) else "picture"

    def encode_into(out: GrowingTensorFile | TensorsInMemory) -> list[Captions]:
        try:
            return encode_source(source, parts.vae.to(device), config.encode_batch, out, unit)
        finally:
            parts.vae.to("cpu")  # the loop needs the memory; sampling fetches it back

    def fill(temporary: Path) -> None:
        with GrowingTensorFile(temporary / "latents.safetensors") as out:
            captions = encode_into(out)
        (temporary / "captions.json").write_text(json.dumps(captions), encoding="utf-8")

    if config.cache:
        return _kept(Path(config.cache) / key, _read, fill, "latents")
    out = TensorsInMemory()
    captions = encode_into(out)
    return _latent_set(out.tensors(), captions)


@dataclass
class CaptionTable:
    """Every different caption once, entry 0 being the empty one that caption dropout puts in place.

    `values`: token ids `(U, L)` int64 for a trained text encoder, else its output `(U, L, D)`; of classes their
    numbers `(U,)`, the null class first. `mask`: `(U, L)` int64, None with classes, and with embeddings for Wan.
    `choice[b]`: `(K_b, V)` int64 entries of each picture, `count[b]`: `(K_b,)` how many.
    """

    values: torch.Tensor
    mask: torch.Tensor | None
    choice: list[torch.Tensor]
    count: list[torch.Tensor]


# Words with one space between them: Wan's clean-up, which takes longer than tokenising, leaves them as they are.
_CLEAN = re.compile(r"[A-Za-z0-9,.'-]+(?: [A-Za-z0-9,.'-]+)*")


def cleaned(text: str, videos: bool) -> str:
    """The clean-up that the pipelines apply: SANA's lower case, Wan's single spaces."""
    if not videos:
        return text.lower().strip()
    if _CLEAN.fullmatch(text):
        return text
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return prompt_clean(text)


def tokenise(tokenizer, texts: list[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(len(texts), length)` int64, right-padded."""
    tokenizer.padding_side = "right"
    tokens = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True,
        add_special_tokens=True, return_tensors="pt",
    )  # fmt: skip
    return tokens.input_ids, tokens.attention_mask


@torch.no_grad()
def embed_captions(
    parts: Components, texts: list[str], length: int, device: torch.device, batch: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the frozen text encoder, as the pipeline itself encodes prompts, on the CPU."""
    pipeline = parts.pipeline()
    text_encoder = parts.text_encoder.to(device).eval()
    values, masks = [], []
    for start in range(0, len(texts), batch):
        embeds, mask, _, _ = pipeline.encode_prompt(
            texts[start : start + batch], do_classifier_free_guidance=False, device=device,
            max_sequence_length=length, complex_human_instruction=parts.instruction,
        )  # fmt: skip
        values.append(embeds.cpu())
        masks.append(mask.cpu().long())
    text_encoder.to("cpu")
    values, mask = torch.cat(values), torch.cat(masks)
    longest = int(mask.sum(1).max())  # right-padded: nothing but padding behind it
    return values[:, :longest].contiguous(), mask[:, :longest].contiguous()


@torch.no_grad()
def embed_video_captions(
    parts: Components, texts: list[str], length: int, device: torch.device, batch: int = 8
) -> torch.Tensor:
    """Output `(U, length, D)` of the frozen text encoder as Wan's pipeline gives it, on the CPU: zeros are padding."""
    pipeline = parts.pipeline()
    text_encoder = parts.text_encoder.to(device).eval()
    values = []
    for start in range(0, len(texts), batch):
        embeds, _ = pipeline.encode_prompt(
            prompt=texts[start : start + batch], do_classifier_free_guidance=False, device=device,
            max_sequence_length=length,
        )  # fmt: skip
        values.append(embeds.cpu())
    text_encoder.to("cpu")
    return torch.cat(values)


def load_or_embed(
    parts: Components, texts: list[str], length: int, device: torch.device, cache: str
) -> torch.Tensor:
    """`embed_video_captions`, from the cache when text encoder, tokenizer and captions are the same.

    Wan's text encoder has four times the weights of its small transformer.
    """
    if not cache:
        return embed_video_captions(parts, texts, length, device)

    def fill(temporary: Path) -> None:
        values = embed_video_captions(parts, texts, length, device).contiguous()
        save_file({"values": values}, temporary / "captions.safetensors")

    folder = Path(cache) / _text_digest(parts.base, texts, length)
    return _kept(folder, lambda found: load_file(found / "captions.safetensors")["values"], fill, "captions")


def caption_table(
    encoded: LatentSet, parts: Components, trained: bool, length: int, device: torch.device, cache: str = ""
) -> CaptionTable:
    """Tokenises (trained text encoder) or encodes (frozen) every different caption of the set.

    `cache`: folder for the embeddings of videos' captions; empty: encode anew.
    """
    number = {"": 0}
    choice, count = [], []
    for captions in encoded.captions:
        most = max(len(variants) for variants in captions)
        rows = [[number.setdefault(text, len(number)) for text in variants] for variants in captions]
        count.append(torch.tensor([len(row) for row in rows]))
        choice.append(torch.tensor([row + [0] * (most - len(row)) for row in rows]))
    texts = list(number)
    videos = makes_videos(parts.transformer)
    if trained:
        values, mask = tokenise(parts.tokenizer, [cleaned(text, videos) for text in texts], length)
    elif videos:
        values, mask = load_or_embed(parts, texts, length, device, cache), None
    else:
        values, mask = embed_captions(parts, texts, length, device)
    return CaptionTable(values, mask, choice, count)


def label_table(encoded: LatentSet, numbers: dict[str, int], null_class: int) -> CaptionTable:
    """The class of each picture, whose only caption is the class's name."""
    entries = {name: entry for entry, name in enumerate(numbers, 1)}
    values = torch.tensor([null_class, *numbers.values()])
    choice = [torch.tensor([[entries[texts[0]]] for texts in captions]) for captions in encoded.captions]
    return CaptionTable(values, None, choice, [torch.ones(len(rows), dtype=torch.int64) for rows in choice])
