"""Train the heads by which pictures of emoji are named: EfficientNet-Lite0 and MiniLM stay frozen.

    python train/emoji_heads.py --data data/emoji64.tar --minilm path/to/all-MiniLM-L6-v2 \\
        --out eval/weights/emoji_heads.safetensors --report eval/results/emoji_heads.json

Features take a quarter of an hour on one core and are kept in --cache; each seed then takes minutes. Trained on
split `train` only. What is reported: how often a real drawing's own concept is the nearest, or among the five nearest,
of val (concepts never seen, against val's) and of heldout (a concept seen in other styles, against all concepts).
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from mhla_diffusion.evaluation.concepts import chance
from mhla_diffusion.evaluation.emoji_world.heads import EmojiHeads
from mhla_diffusion.evaluation.emoji_world.reading import PALETTE, background_of, box_of, crop_of, foreground
from mhla_diffusion.evaluation.features import efficientnet_lite0, image_features
from mhla_diffusion.evaluation.networks.sentences import sentence_encoder
from mhla_diffusion.pipelines.pictures import write_atomically
from mhla_diffusion.provenance import versions
from mhla_diffusion.training.emoji import load_sprites, on_background, resized

SPLITS = ("train", "val", "heldout")
SMALL = (24, 32)  # sides of a drawing in a scene of 64 pixels
SCALE = 20.0  # of the cosines in the loss


def pictures_of(sprites, split: str, small: bool) -> torch.Tensor:
    """uint8 `(N, 3, 128, 128)`: each drawing as the scorer crops it, whole on white or small on a colour."""
    found = []
    rng = np.random.default_rng((0, SPLITS.index(split)))
    tiles = {side: resized(sprites.rgba, side) for side in SMALL} if small else {}
    names = list(PALETTE)
    for index in range(len(sprites)):
        if small:
            side = SMALL[rng.integers(2)]
            rgb = PALETTE[names[rng.integers(len(names))]]
            x, y = rng.integers(0, 65 - side, 2)
            canvas = np.empty((64, 64, 3), np.uint8)
            canvas[:] = rgb
            canvas[y : y + side, x : x + side] = on_background(tiles[side][index], rgb)
        else:
            canvas = on_background(sprites.rgba[index], "white")
        picture = torch.from_numpy(canvas).permute(2, 0, 1).contiguous()
        background = background_of(picture)
        mask = foreground(picture, background)
        if not mask.any():  # a white drawing on white
            mask[:] = True
        found.append(crop_of(picture, box_of(mask), background))
    return torch.stack(found)


def features_of(args, sets: dict) -> dict[str, torch.Tensor]:
    """ "split/whole" and "split/small" -> `(N, 1280)`, from the cache if it is of these data."""
    digest = hashlib.file_digest(open(args.data, "rb"), "sha256").hexdigest()
    cache = Path(args.cache)
    if cache.is_file():
        kept = torch.load(cache, weights_only=True)
        if kept.pop("data_sha256") == digest:
            return kept
    network = efficientnet_lite0()
    found = {}
    for split, sprites in sets.items():
        for kind in ("whole", "small"):
            started = time.perf_counter()
            found[f"{split}/{kind}"] = image_features(network, pictures_of(sprites, split, kind == "small"))
            print(f"{split}/{kind}: {len(sprites)} in {time.perf_counter() - started:.0f} s", flush=True)
    cache.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found | {"data_sha256": digest}, cache)
    return found


def texts_of(records: list[dict], encode) -> dict[str, torch.Tensor]:
    """Concept -> `(2, 384)`: its name, and its name with keywords."""
    first = {record["concept"]: record for record in reversed(records)}
    names = list(first)
    longer = [", ".join([name, *first[name]["tags"][:6]]) for name in names]
    vectors = torch.stack([encode(names), encode(longer)], 1)
    return dict(zip(names, vectors, strict=True))


def train(features: dict, sets: dict, texts: dict, seed: int, epochs: int) -> EmojiHeads:
    """Cross-entropy of each drawing's concept among all of `train`, texts encoded anew each step."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    names = sorted({record["concept"] for record in sets["train"].records})
    label = {name: i for i, name in enumerate(names)}
    target = torch.tensor([label[record["concept"]] for record in sets["train"].records] * 2)
    inputs = torch.cat([features["train/whole"], features["train/small"]])
    words = torch.stack([texts[name] for name in names])  # (K, 2, 384)
    heads = EmojiHeads(names)
    heads.mean.copy_(inputs.mean(0))
    heads.std.copy_(inputs.std(0).clamp_min(1e-3))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3, weight_decay=0.05)
    size = min(256, len(inputs))
    steps = epochs * (len(inputs) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs), generator=draw).split(size)[: len(inputs) // size]:
            which = torch.randint(0, 2, (len(names),), generator=draw)
            kept = torch.rand(size, 1280, generator=draw) > 0.2  # dropout on the features
            image = heads.images(heads.mean + (inputs[batch] - heads.mean) * kept / 0.8)
            text = heads.texts(words[torch.arange(len(names)), which])
            loss = F.cross_entropy(SCALE * image @ text.T, target[batch], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    return heads.eval()


@torch.no_grad()
def accuracy(
    heads: EmojiHeads, features: torch.Tensor, records: list[dict], texts: dict, names: list[str]
) -> dict:
    """R@1 and R@5 of each picture's concept among `names`, with what guessing gives."""
    candidates = heads.texts(torch.stack([texts[name][0] for name in names]))
    own = torch.tensor([names.index(record["concept"]) for record in records])
    cosine = heads.images(features) @ candidates.T
    rank = (cosine > cosine.gather(1, own[:, None])).sum(1)
    return {
        "pictures": len(records),
        "candidates": len(names),
        "r_at_1": round((rank < 1).double().mean().item(), 4),
        "r_at_5": round((rank < 5).double().mean().item(), 4),
        "chance_at_1": round(chance(len(names), 1), 5),
        "chance_at_5": round(chance(len(names), 5), 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="data/emoji64.tar", help="the emoji set (default: %(default)s)")
    add("--minilm", metavar="FOLDER", help="all-MiniLM-L6-v2 (default: where `minilm` is found)")
    add("--out", default="outputs/emoji_heads.safetensors", help="default: %(default)s")
    add("--report", default="outputs/emoji_heads.json", help="default: %(default)s")
    add("--cache", default="outputs/emoji_heads_features.pt", help="features (default: %(default)s)")
    add("--epochs", type=int, default=20, help="default: %(default)s")
    add("--seeds", type=int, default=3, help="runs; the first is written (default: %(default)s)")
    add("--features-only", action="store_true", help="stop when the cache is filled")
    args = parser.parse_args()
    try:
        sets = {split: load_sprites(args.data, split) for split in SPLITS}
        features = features_of(args, sets)
        if args.features_only:
            return 0
        encoder = sentence_encoder(args.minilm)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    records = [record for split in SPLITS for record in sets[split].records]
    texts = texts_of(records, encoder.encode)
    groups = {
        "val": sorted({record["concept"] for record in sets["val"].records}),
        "heldout": sorted(texts),
        "train": sorted(texts),
    }
    runs = []
    for seed in range(args.seeds):
        started = time.perf_counter()
        heads = train(features, sets, texts, seed, args.epochs)
        row = {
            f"{split}/{kind}": accuracy(heads, features[f"{split}/{kind}"], sets[split].records, texts, names)
            for split, names in groups.items()
            for kind in ("whole", "small")
        }
        runs.append({"seed": seed, "seconds": round(time.perf_counter() - started, 1), **row})
        print(json.dumps(runs[-1]), flush=True)
        if seed == 0:
            names = sorted(texts)
            with torch.no_grad():
                vectors = heads.texts(torch.stack([texts[name][0] for name in names]))
            shipped = EmojiHeads(names, {"accuracy": row, "seed": 0, "epochs": args.epochs})
            shipped.load_state_dict(heads.state_dict() | {"vectors": vectors})
            shipped.save(Path(args.out))
    report = {
        "heads": hashlib.sha256(Path(args.out).read_bytes()).hexdigest(),
        "runs": runs,
        "settings": {
            "data_sha256": hashlib.file_digest(open(args.data, "rb"), "sha256").hexdigest(),
            "trained_on": "train: every drawing whole on white, and small on a colour",
            "text": "concept without its style; in training also with up to six keywords",
            "epochs": args.epochs,
            "sentences": encoder.about,
        },
        "versions": versions(),
    }
    text = json.dumps(report, indent=1) + "\n"
    Path(args.report).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(args.report), lambda file: file.write(text.encode()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
