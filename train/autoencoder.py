"""Train the small autoencoder of a recipe: python train/autoencoder.py RECIPE [--set key=value ...]."""

import argparse
import json
import sys

from mhla_diffusion.training.autoencoder_kinds import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="TOML file, e.g. train/recipes/autoencoder-emoji.toml")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override recipe values"
    )
    parser.add_argument("--device", help="cuda or cpu; the GPU when there is one")
    arguments = parser.parse_args()
    try:
        figures = run(arguments.recipe, arguments.set, arguments.device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left_out = ("recipe", "history", "device", "torch", "latents_mean", "latents_std")
    print(json.dumps({k: v for k, v in figures.items() if k not in left_out}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
