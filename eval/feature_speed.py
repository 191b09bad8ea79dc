"""How long Inception features of many pictures take, decoding included.

    python eval/feature_speed.py --pictures 50000 --workers 16 --out outputs/feature_speed.json

Pictures are made first (not timed): 256 px PNGs of coloured noise, --different of them, linked under further names. The
network has random weights: they compute as long as the real ones. The way is that of `mhla eval run fid_adm`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from mhla_diffusion.evaluation.gathering import gather
from mhla_diffusion.evaluation.image_scores import environment
from mhla_diffusion.evaluation.networks.extractors import of_inception
from mhla_diffusion.evaluation.networks.inception import FIDInception
from mhla_diffusion.evaluation.picture_sets import open_pictures
from mhla_diffusion.pipelines.pictures import write_atomically


def make_pictures(folder: Path, count: int, different: int, size: int) -> None:
    """Noise that is smooth, with a little that is not, so that files are about as large as photographs'."""
    draw = np.random.default_rng(0)
    for index in range(min(count, different)):
        coarse = Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8)).resize(
            (size, size), Image.BICUBIC
        )
        noisy = np.asarray(coarse).astype(np.int16) + draw.integers(-6, 7, (size, size, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(
            folder / f"{index:06}.png", compress_level=1
        )
    for index in range(different, count):
        os.link(folder / f"{index % different:06}.png", folder / f"{index:06}.png")


def measure(args: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    taps = ("spatial", "pool")
    extractor = of_inception(
        FIDInception(), taps, protocol=args.protocol, device=args.device, weights={"random": True}
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_pictures(folder, args.pictures, args.different, args.size)
        pictures = open_pictures(folder)
        extractor(
            torch.zeros(min(args.batch_size, 2), 3, args.size, args.size, dtype=torch.uint8)
        )  # loads kernels
        how = {"moments": set(taps), "batch_size": args.batch_size, "workers": args.workers}
        start = time.perf_counter()
        with tqdm(total=len(pictures), unit="picture") as bar:
            found = gather(pictures, extractor, progress=bar.update, **how)
        found.moments("pool", "set")  # waits for the device
        seconds = time.perf_counter() - start
        about = pictures.about()
        mean_bytes = sum(file.stat().st_size for file in pictures.files) / len(pictures)
    return {
        "pictures": found.count,
        "seconds": round(seconds, 2),
        "pictures_per_second": round(found.count / seconds, 1),
        "settings": {
            **{
                name: getattr(args, name)
                for name in ("size", "different", "batch_size", "workers", "protocol")
            },
            "mean_file_bytes": round(mean_bytes),
            "codecs": about["codecs"],
            "taps": taps,
        },
        "environment": environment(extractor),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--different", type=int, default=2000, help="different files (default: %(default)s)")
    parser.add_argument("--size", type=int, default=256, help="pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--protocol", default="fid_adm", help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--out", default="outputs/feature_speed.json", help="default: %(default)s")
    args = parser.parse_args()
    try:
        result = measure(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=1) + "\n"
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(args.out), lambda file: file.write(text.encode()))
    print(f"{result['pictures']} pictures in {result['seconds']} s, {result['pictures_per_second']} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
