"""Trains what a recipe says; the same as `mhla train`, as a file that `accelerate launch` can start.

python train/train.py train/recipes/finetune-folder.toml --set data.path=my-pictures
accelerate launch --num_processes 2 train/train.py train/recipes/sana-mhla-emoji.toml
torchrun --nproc_per_node 2 train/train.py train/recipes/sana-mhla-emoji.toml
"""

import argparse
import sys

from mhla_diffusion.training import run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="TOML recipe; train/README.md lists every setting")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[],
                        metavar="SECTION.KEY=VALUE", help="replace settings of the recipe")  # fmt: skip
    parser.add_argument("--resume", default="auto", metavar="auto|none|FOLDER",
                        help="auto: go on from the newest checkpoint in the output folder, if any")  # fmt: skip
    args = parser.parse_args()
    try:
        run(args.recipe, args.overrides, args.resume)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
