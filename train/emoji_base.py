"""Tokenizer and scheduler of an emoji pipeline.

python train/emoji_base.py --data data/emoji64.tar --out pipelines/sana-mhla-emoji
python train/emoji_base.py --data data/emoji64.tar --out pipelines/wan-mhla-emoji --videos
"""

import argparse
import sys
from pathlib import Path

from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

from mhla_diffusion.training.emoji import materialise
from mhla_diffusion.training.moving_emoji import MovingEmoji
from mhla_diffusion.training.tokenizer import train_tokenizer, word_tokenizer

CLIPS = 20000  # enough that every sprite and every word is in a caption


def picture_parts(data: str, vocab_size: int, max_length: int) -> tuple:
    """Tokenizer, scheduler and captions of the SANA pipeline."""
    _, captions = materialise(data, split="train", backgrounds=2, compositions=4000)
    tokenizer = train_tokenizer(captions, vocab_size, max_length)
    # SANA's solver; no shift: 256 tokens keep little of a picture at high noise, unlike the 1024 of a 1024-px SANA
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0, solver_order=2
    )
    return tokenizer, scheduler, [caption.lower() for caption in captions]


def clip_parts(data: str, max_length: int) -> tuple:
    """Tokenizer, scheduler and captions of the Wan pipeline."""
    captions = [
        plan.caption
        for split in ("train", "heldout")  # the same sprites and motions, in other pairs
        for plan in MovingEmoji(data, split).plans(range(CLIPS))
    ]
    # Wan 2.1's solver and its shift: neighbouring frames are alike, so much of a clip outlasts high noise
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    )
    return word_tokenizer(captions, max_length), scheduler, captions


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="sprite file written by train/build_emoji.py")
    parser.add_argument("--out", required=True, help="pipeline folder, e.g. pipelines/sana-mhla-emoji")
    parser.add_argument("--videos", action="store_true", help="of Wan, for captions of moving emoji")
    parser.add_argument("--vocab-size", type=int, default=3072, help="SANA: tokens in all")
    parser.add_argument("--max-length", type=int, default=32, help="tokens of the longest caption kept")
    arguments = parser.parse_args()
    try:
        if arguments.videos:
            tokenizer, scheduler, captions = clip_parts(arguments.data, arguments.max_length)
        else:
            tokenizer, scheduler, captions = picture_parts(
                arguments.data, arguments.vocab_size, arguments.max_length
            )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokenizer.save_pretrained(Path(arguments.out, "tokenizer"))
    scheduler.save_pretrained(Path(arguments.out, "scheduler"))
    lengths = sorted(len(ids) for ids in tokenizer(captions).input_ids)
    print(
        f"{len(tokenizer)} tokens; captions: median {lengths[len(lengths) // 2]}, longest {lengths[-1]} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
