"""A few training steps of the full-size recipes on random weights and data: step time, peak memory, finite losses.

    python train/full_size_steps.py --out outputs/full_size_steps.json --minutes 2
    python train/full_size_steps.py --only dit-s2-256 --batch 1 --steps 2 --device cpu --out outputs/try.json

Nothing is downloaded or read but the recipes. The file is written after every row; no row is begun after --minutes.
"""

import argparse
import datetime
import gc
import json
import sys
import time
from pathlib import Path

import torch

from mhla_diffusion.models.dit_presets import dit_config
from mhla_diffusion.models.sana_presets import sana_config
from mhla_diffusion.models.wan_presets import wan_config
from mhla_diffusion.training.recipe import load_recipe
from mhla_diffusion.training.rehearsal import Rehearsal

RECIPES = Path(__file__).resolve().parent / "recipes"
WAN = wan_config("2.1-t2v-1.3B")
# Name, recipe, its base's transformer, pictures or videos per step on one GPU, further settings.
ROWS = [
    ("dit-s2-256", "dit-s2-256.toml", None, 256, []),
    ("dit-xl2-512", "dit-xl2-mhla.toml", dit_config("XL/2", 512), 16, []),
    ("sana-0.6b-1024", "sana-0.6b-mhla.toml", sana_config("0.6B", 1024), 16, []),
    ("dit-xl2-512-lora", "dit-xl2-mhla.toml", dit_config("XL/2", 512), 16, ['model.train="lora+mixing"']),
    ("wan-1.3b", "wan-1.3b-mhla.toml", WAN, 1, []),
    ("wan-1.3b-hybrid", "wan-1.3b-mhla.toml", WAN, 1, ['model.convert.layers="2/3"']),
    ("wan-1.3b-lora", "wan-1.3b-mhla.toml", WAN, 1, ['model.train="lora+mixing"']),
]
DEFAULT = ("dit-s2-256", "dit-xl2-512", "sana-0.6b-1024")


def row(name: str, file: str, base: dict | None, settings: list[str], steps: int) -> dict:
    recipe = load_recipe(RECIPES / file, settings)
    torch.compiler.reset()
    try:
        videos = recipe.data.kind == "videos"  # whose latents and captions are large
        return {**Rehearsal(recipe, base, 4 if videos else 64).measure(steps), "name": name, "recipe": file}
    except torch.cuda.OutOfMemoryError as error:
        return {"name": name, "recipe": file, "finite": False, "error": str(error).splitlines()[0]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def as_text(row: dict) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    memory = "" if row["peak_gb"] is None else f", peak {row['peak_gb']:.1f} GB"
    what = "videos" if len(row["latents"]) == 4 else "pictures"
    return (
        f"{row['name']}: {row['step_ms']:.1f} ms a step of {row['batch_size']} {what}{memory}, settled after "
        f"{row['settling_s']:.0f} s, loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}, "
        f"{'finite' if row['finite'] else 'NOT FINITE'}, {row['trained_parameters']:,} of {row['parameters']:,} "
        "numbers trained"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON")
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="begin no row after this time (default: 2)"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each row (default: 20)")
    parser.add_argument("--only", nargs="+", default=list(DEFAULT), choices=[r[0] for r in ROWS], metavar="NAME",
                        help=f"rows: {', '.join(r[0] for r in ROWS)} (default: {', '.join(DEFAULT)})")  # fmt: skip
    parser.add_argument("--batch", type=int, default=0, help="pictures or videos per step; 0: each row's own")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[],
                        metavar="SECTION.KEY=VALUE", help="replace settings of the recipes")  # fmt: skip
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps: give at least 2, the first compiles")
    if args.device == "auto" and not torch.cuda.is_available():
        parser.error("full sizes want a CUDA device; --device cpu --batch 1 tries a row out in minutes")
    began, rows = time.monotonic(), []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, file, base, batch, settings in ROWS:
        if name not in args.only:
            continue
        if time.monotonic() - began > 60 * args.minutes:
            print(f"{name}: not begun, {args.minutes:g} minutes are over")
            continue
        common = [f"run.batch_size={args.batch or batch}", f"run.device={args.device}"]
        if args.device == "cpu" or not torch.cuda.is_available():
            common.append("run.compile=false")
        rows.append(row(name, file, base, [*settings, *common, *args.overrides], args.steps))
        print(as_text(rows[-1]), flush=True)
        facts = {
            "what": "Training steps of full-size recipes on random weights and random latents",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "rows": rows,
        }
        args.out.write_text(json.dumps(facts, indent=1))
    return 0 if rows and all(r["finite"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
