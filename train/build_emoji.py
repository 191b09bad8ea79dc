"""Builds the emoji set: ``python train/build_emoji.py --out data/emoji64.tar`` (needs npm)."""

from mhla_diffusion.training.emoji_build import main

if __name__ == "__main__":
    raise SystemExit(main())
