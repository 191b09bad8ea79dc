"""Does a pipeline draw what it is asked for? Draws a split's captions and ranks real concepts by likeness.

    python eval/concepts.py --pipeline pipelines/sana-mhla-emoji --data data/emoji64.tar --out outputs/concepts

The protocol is in eval/README.md. Drawing goes on where it was stopped; the result is written to <out>/result.json.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mhla_diffusion.evaluation.concepts import chance, concept_ranks, top_k
from mhla_diffusion.evaluation.features import efficientnet_lite0, image_features
from mhla_diffusion.evaluation.networks.weight_files import sha256_of
from mhla_diffusion.pipelines.generation import generate
from mhla_diffusion.pipelines.pictures import read_settings, write_atomically
from mhla_diffusion.provenance import versions
from mhla_diffusion.training.emoji import load_sprites, on_background


def pixels(arrays: np.ndarray) -> torch.Tensor:
    """(N, H, W, 3) uint8 -> (N, 3, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(arrays.transpose(0, 3, 1, 2)))


def scores(ranks: torch.Tensor, styles: list[str]) -> dict[str, dict[str, float]]:
    """Number of pictures, top-1 and top-5 share, in all and for each style."""
    groups = {"all": torch.ones(len(ranks), dtype=torch.bool)}
    groups |= {style: torch.tensor([other == style for other in styles]) for style in sorted(set(styles))}
    return {
        name: {"pictures": int(kept.sum()), "top_1": top_k(ranks[kept], 1), "top_5": top_k(ranks[kept], 5)}
        for name, kept in groups.items()
    }


def evaluate(args: argparse.Namespace) -> dict:
    out = Path(args.out)
    asked, gallery = load_sprites(args.data, args.split), load_sprites(args.data, "train")
    known = {record["concept"] for record in gallery.records}
    # A concept without any real picture in the gallery cannot be found: such captions are left out, and counted.
    kept = [i for i, record in enumerate(asked.records) if record["concept"] in known]
    left_out = len(asked) - len(kept)
    if not kept:
        raise ValueError(
            f"no concept of split {args.split} has a drawing in train: use --split heldout or train"
        )
    asked = asked.select(kept[: args.limit])
    concepts = [record["concept"] for record in asked.records]
    styles = [record["style"] for record in asked.records]

    report = generate(
        [record["caption"] for record in asked.records],
        pipeline=args.pipeline,
        seeds=[args.seed + i for i in range(len(asked))],
        steps=args.steps,
        guidance=args.guidance,
        out=out / "pictures",
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
    )
    if report.failed:
        index, reason = next(iter(report.failed.items()))
        raise ValueError(f"{len(report.failed)} pictures failed, the first is {concepts[index]!r}: {reason}")
    paths = [(report.drawn | report.skipped)[i] for i in range(len(asked))]
    drawn = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])

    network = efficientnet_lite0("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    features = image_features(network, pixels(on_background(gallery.rgba, "white")))
    gallery_concepts = [record["concept"] for record in gallery.records]
    ranked = {
        "drawn": concept_ranks(image_features(network, pixels(drawn)), concepts, features, gallery_concepts),
        "real": concept_ranks(
            image_features(network, pixels(on_background(asked.rgba, "white"))),
            concepts,
            features,
            gallery_concepts,
        ),
    }
    settings = read_settings(paths[0])
    return {
        "drawn": scores(ranked["drawn"], styles),
        "real": scores(ranked["real"], styles),
        "chance": {"concepts": len(known), "top_1": chance(len(known), 1), "top_5": chance(len(known), 5)},
        "settings": {
            "split": args.split,
            "captions_left_out": left_out,
            "first_seed": args.seed,
            "data_sha256": sha256_of(Path(args.data)),
            "features": "EfficientNet-Lite0, ImageNet weights, 128 px",
            **{
                key: settings[key]
                for key in settings
                if key not in ("prompt", "seed", "defaults", "versions")
            },
        },
        "versions": versions(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline", default="pipelines/sana-mhla-emoji", help="default: %(default)s")
    parser.add_argument("--data", default="data/emoji64.tar", help="the emoji set (default: %(default)s)")
    parser.add_argument("--split", default="heldout", help="whose captions are drawn (default: %(default)s)")
    parser.add_argument("--out", default="outputs/concepts", help="folder (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="only the first N captions")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first picture; the others count on from it"
    )
    parser.add_argument("--steps", type=int, help="default: the pipeline's")
    parser.add_argument("--guidance", type=float, help="default: the pipeline's")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="pictures drawn at a time (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    try:
        result = evaluate(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    text = json.dumps(result, indent=1) + "\n"
    write_atomically(Path(args.out) / "result.json", lambda file: file.write(text.encode()))
    print(f"{'':8}{'pictures':>9}{'top 5':>8}{'real':>8}   chance {result['chance']['top_5']:.2%}")
    for name, row in result["drawn"].items():
        print(f"{name:8}{row['pictures']:9}{row['top_5']:8.1%}{result['real'][name]['top_5']:8.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
