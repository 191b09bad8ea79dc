"""CLIP through open_clip or transformers, from weights on this machine; random ones only when asked for by name."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..faults import MissingWeights
from .extractors import COLOURS, usable
from .image_text import ImageTextModel, shortest_side_pixels
from .transformers_folders import load_model
from .weight_files import Found, about_weights, find_weights, told

PREPARATION = (
    "mean",
    "std",
    "interpolation",
    "resize_mode",
)  # what open_clip's list of weights says of pictures


def clip_model(
    weights: str | os.PathLike | None = None,
    *,
    model: str = "ViT-L-14",
    pretrained: str | None = None,
    quick_gelu: bool | None = None,
    random_weights: bool = False,
    device: str | torch.device = "auto",
) -> ImageTextModel:
    """CLIP from a file or a folder.

    Args:
        weights: a file of weights for open_clip (`.safetensors`, a state dict, or OpenAI's own `.pt`), a folder with
            `open_clip_config.json`, or one in transformers' layout. Without it `$MHLA_WEIGHTS/clip/` is searched.
        model: open_clip's name of the architecture, for a file; a folder says it itself.
        pretrained: open_clip's name of the weights in the file, such as "openai"; it says which activation they need.
            Without it the file's sha256 is looked up in open_clip's list.
        quick_gelu: which activation, in place of what the weights are known to need.
        random_weights: build `model` untrained, to try programs out; no weights are read.

    Raises MissingWeights with every place searched; ValueError for another kind of model, an unknown name, or a
    TorchScript file that is none of OpenAI's.
    """
    where = usable(device)
    if random_weights:
        return open_clip_model(None, model, pretrained, quick_gelu, where)
    try:
        found = find_weights("clip", weights)
    except MissingWeights as error:
        raise MissingWeights(f"{error}, or try it out with --random-weights") from None
    if found.path.is_dir() and not (found.path / "open_clip_config.json").is_file():
        return transformers_clip(found, where)
    return open_clip_model(found, model, pretrained, quick_gelu, where)


def open_clip_or_refuse():
    try:
        import open_clip
    except ImportError as error:
        raise MissingWeights(
            f"open_clip is not installed ({error.name} is missing): pip install 'mhla_diffusion[eval]'"
        ) from error
    return open_clip


def open_clip_model(
    found: Found | None, name: str, pretrained: str | None, quick_gelu: bool | None, device: torch.device
) -> ImageTextModel:
    """What `clip_model` does with open_clip's files; `found` None: random weights."""
    open_clip = open_clip_or_refuse()
    notes: list[str] = []
    about = {"library": "open_clip"}
    if found is None:
        notes.append(f"{name} has random weights: these numbers say nothing about pictures")
        about |= {"weights": "random"}
    else:
        about |= {"weights": about_weights("clip", found)}
    if found is not None and found.path.is_dir():
        name = f"local-dir:{found.path}"
        config = json.loads((found.path / "open_clip_config.json").read_text())["model_cfg"]
        tag, known = None, bool(config.get("quick_gelu", False))
        build = {"require_pretrained": True}
        title = config.get("model_name", found.path.name)
    else:
        config = open_clip.get_model_config(name)
        if config is None:
            raise ValueError(
                f"open_clip knows no model {name!r}: the names are those of open_clip.list_models()"
            )
        tag = tag_of(open_clip, name, pretrained, about["weights"]["sha256"] if found else "", notes)
        known = bool(tag["quick_gelu"]) if tag else None
        build = {"load_weights": False, "pretrained_text": False}
        build |= {"force_preprocess_cfg": {key: tag[key] for key in PREPARATION if key in tag}} if tag else {}
        title = "random" if found is None else tag["name"] if tag else found.path.name
        title = f"{name.removesuffix('-quickgelu')} {title}"
    check_offline(name, config)
    stated = bool(config.get("quick_gelu", False))
    chosen = activation(stated, known, quick_gelu, found is not None, notes)
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # random weights are the same in every run
            network = open_clip.create_model(name, device="cpu", quick_gelu=chosen, **build)
    except RuntimeError as error:
        raise MissingWeights(
            f"{name} has no weights that fit ({' '.join(str(error).split())[:200]})"
        ) from error
    if found is not None and found.path.is_file():
        load(open_clip, network, found.path, tag)
    network = network.eval().to(device)
    tokenizer = open_clip.get_tokenizer(name)
    settings = open_clip.get_model_preprocess_cfg(network)
    transform = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(**settings), is_train=False
    )

    def prepare(pictures: Tensor) -> Tensor:
        images = (Image.fromarray(each.permute(1, 2, 0).contiguous().numpy()) for each in pictures)
        return torch.stack([transform(image) for image in images])

    def length(caption: str) -> int:
        if hasattr(tokenizer, "encode"):
            return len(tokenizer.encode(caption)) + 2
        return len(tokenizer.tokenizer(tokenizer.clean_fn(caption)).input_ids)

    return ImageTextModel(
        prepare=prepare,
        image=network.encode_image,
        text=network.encode_text,
        tokenize=lambda captions: (tokenizer(captions),),
        length=length,
        context=tokenizer.context_length,
        about=about
        | {
            "network": f"CLIP {title}",
            "activation": "QuickGELU" if chosen else "GELU",
            "activation_known_from": "the weights" if known is not None else "the model's name only",
            "resize": f"{settings['interpolation']}, {settings['resize_mode']} side to {settings['size']}",
            "image_size": settings["size"],
            "width": config["embed_dim"],
            "logit_scale": float(network.logit_scale.detach().exp()),
            "context": tokenizer.context_length,
        },
        device=device,
        notes=notes,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without open_clip's warning that weights are random, which those of a file are not, and others are noted."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def tag_of(open_clip, name: str, pretrained: str | None, sha256: str, notes: list[str]) -> dict | None:
    """open_clip's entry for the weights: by the file's hash, else by the name given; a name alone is noted.

    Raises ValueError for a name that open_clip does not know, and for a file that is known to hold something else.
    """
    plain = name.removesuffix("-quickgelu")
    found = None
    if pretrained is not None:
        for model in (plain, name):
            found = found or open_clip.get_pretrained_cfg(model, pretrained)
        if not found:
            tags = ", ".join(open_clip.list_pretrained_tags_by_model(plain)) or "none"
            raise ValueError(f"open_clip knows no weights {pretrained!r} of {name}: it knows {tags}")
    for model, tag in open_clip.list_pretrained() if sha256 else ():
        entry = open_clip.get_pretrained_cfg(model, tag)
        url = entry.get("url", "")
        if f"/{sha256}/" in url or f"-{sha256[:8]}." in url:
            if model.removesuffix("-quickgelu") != plain or tag != (pretrained or tag):
                wanted = f"{name} {pretrained}" if pretrained else name
                raise ValueError(
                    f"the file holds {tag} of {model}, not {wanted}: give --clip-model {model} --clip-pretrained {tag}"
                )
            return entry | {"name": tag, "quick_gelu": entry.get("quick_gelu", False)}
    if found is None:
        return None
    if sha256:
        notes.append(
            f"the file's hash is not in open_clip's list: that it holds {pretrained} is taken on trust"
        )
    return found | {"name": pretrained, "quick_gelu": found.get("quick_gelu", False)}


def check_offline(name: str, config: dict) -> None:
    """Refuse architectures whose parts open_clip would fetch from the hub."""
    text = config.get("text_cfg", {})
    local = name.startswith("local-dir:")  # whose tokenizer lies in the folder
    if text.get("hf_model_name") or (
        not local and (text.get("hf_tokenizer_name") or "siglip" in name.lower())
    ):
        raise ValueError(
            f"{name} takes its text encoder or tokenizer from the hub, and nothing is downloaded here: give a folder "
            "in transformers' layout, or another model"
        )


def activation(stated: bool, known: bool | None, asked: bool | None, trained: bool, notes: list[str]) -> bool:
    """Whether QuickGELU is used; a note where that may be wrong, which no number would show."""
    named = {True: "QuickGELU", False: "GELU"}
    if asked is not None:
        if trained and known is not None and asked != known:
            notes.append(
                f"the weights were trained with {named[known]} and are run with {named[asked]}, as asked: "
                "scores are quietly wrong"
            )
        return asked
    if known is not None:
        return known
    if trained:
        notes.append(
            f"nothing says which activation these weights were trained with; {named[stated]} is taken from the "
            "model's name: name the weights (--clip-pretrained openai), or the model with -quickgelu"
        )
    return stated


def load(open_clip, network: torch.nn.Module, path: Path, tag: dict | None) -> None:
    """Put a file's weights into the network, all of them. Raises ValueError when they do not fit."""
    import zipfile

    scripted = zipfile.is_zipfile(path) and any(
        name.endswith("/constants.pkl") for name in zipfile.ZipFile(path).namelist()
    )
    if scripted:
        # TorchScript runs code when it is read, so only files whose hash is known are.
        from .weight_files import sha256_of

        if tag is None or f"/{sha256_of(path)}/" not in tag.get("url", ""):
            raise ValueError(f"{path} is TorchScript and none of OpenAI's files: give .safetensors")
        weights = torch.jit.load(path, map_location="cpu").state_dict()
        for name in ("input_resolution", "context_length", "vocab_size", "attn_mask"):  # no weights
            weights.pop(name, None)
        network.load_state_dict(
            {name: value.float() for name, value in weights.items()}
        )  # stored in half precision
        return
    try:
        open_clip.load_checkpoint(network, str(path), strict=True, weights_only=True)
    except Exception as error:  # open_clip, torch and safetensors each raise their own
        raise ValueError(f"{path} does not fit the model ({told(error)})") from error


def transformers_clip(found: Found, device: torch.device) -> ImageTextModel:
    """CLIP from a folder in transformers' layout."""
    from transformers import AutoTokenizer, CLIPModel

    network = load_model(CLIPModel, found.path, "clip").to(device)
    config = network.config
    tokenizer = AutoTokenizer.from_pretrained(found.path, local_files_only=True)
    mean, std = COLOURS["clip-image"]
    file = found.path / "preprocessor_config.json"
    if file.is_file():
        settings = json.loads(file.read_text())
        mean, std = settings.get("image_mean", mean), settings.get("image_std", std)
    side, context = config.vision_config.image_size, config.text_config.max_position_embeddings
    towers = {tower.hidden_act for tower in (config.text_config, config.vision_config)}
    notes = [f"the towers differ in activation ({', '.join(sorted(towers))})"] if len(towers) > 1 else []

    def pooled(output) -> Tensor:  # transformers 5 returns an object, 4 a tensor
        return output if isinstance(output, Tensor) else output.pooler_output

    def tokenize(captions: list[str]) -> tuple[Tensor, Tensor]:
        tokens = tokenizer(
            captions, padding="max_length", truncation=True, max_length=context, return_tensors="pt"
        )
        return tokens.input_ids, tokens.attention_mask

    return ImageTextModel(
        prepare=lambda pictures: shortest_side_pixels(pictures, side, mean, std),
        image=lambda pixels: pooled(network.get_image_features(pixel_values=pixels)),
        text=lambda tokens, mask: pooled(network.get_text_features(input_ids=tokens, attention_mask=mask)),
        tokenize=tokenize,
        length=lambda caption: len(tokenizer(caption, verbose=False).input_ids),
        context=context,
        about={
            "library": "transformers",
            "weights": about_weights("clip", found),
            "network": f"CLIP {found.path.name}",
            "activation": ", ".join(sorted(towers))
            .replace("quick_gelu", "QuickGELU")
            .replace("gelu", "GELU"),
            "activation_known_from": "the weights",
            "resize": f"bicubic, shortest side to {side}",
            "image_size": side,
            "width": config.projection_dim,
            "logit_scale": float(network.logit_scale.detach().exp()),
            "context": context,
        },
        device=device,
        notes=notes,
    )
