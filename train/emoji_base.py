"""Tokenizer and scheduler of the emoji pipeline: python train/emoji_base.py --data data/emoji64.tar --out FOLDER."""

import argparse
import sys
from pathlib import Path

from diffusers import DPMSolverMultistepScheduler

from mhla_diffusion.training.emoji import materialise
from mhla_diffusion.training.tokenizer import train_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="sprite file written by train/build_emoji.py")
    parser.add_argument("--out", required=True, help="pipeline folder, e.g. pipelines/sana-mhla-emoji")
    parser.add_argument("--vocab-size", type=int, default=3072)
    parser.add_argument("--max-length", type=int, default=32, help="tokens of the longest caption kept")
    arguments = parser.parse_args()
    try:
        _, captions = materialise(arguments.data, split="train", backgrounds=2, compositions=4000)
        tokenizer = train_tokenizer(captions, arguments.vocab_size, arguments.max_length)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokenizer.save_pretrained(Path(arguments.out, "tokenizer"))
    # SANA's solver; no shift: 256 tokens keep little of a picture at high noise, unlike the 1024 of a 1024-px SANA
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0, solver_order=2
    )
    scheduler.save_pretrained(Path(arguments.out, "scheduler"))
    lengths = sorted(len(ids) for ids in tokenizer([caption.lower() for caption in captions]).input_ids)
    print(
        f"{len(tokenizer)} tokens; captions: median {lengths[len(lengths) // 2]}, longest {lengths[-1]} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
