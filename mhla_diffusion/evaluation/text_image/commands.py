"""`mhla eval run` for protocols of pictures and prompts: what is typed, checked and handed to the library."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .protocols import TextImageProtocol


def add_text_image_options(parser) -> None:
    """Options of `mhla eval run` that only these protocols read."""
    group = parser.add_argument_group("pictures and prompts (clip_score, mjhq30k_clip)")
    add = group.add_argument
    add("--prompts", metavar="FILE",
        help="MJHQ's meta_data.json, .jsonl of {file, prompt}, .txt (default: what the pictures carry)")  # fmt: skip
    add("--long-prompts", choices=("truncate", "error"), default="truncate",
        help="what becomes of prompts with too many tokens (default: %(default)s)")  # fmt: skip
    add("--clip-model", metavar="NAME", help="open_clip's name of the model in a file of weights")
    add("--clip-pretrained", metavar="NAME", help="open_clip's name of those weights, for example openai")
    add("--random-weights", action="store_true", help="try out without weights; numbers mean nothing")


def run_text_image(args: argparse.Namespace, protocol: TextImageProtocol, samples, progress_bar) -> int:
    """Score `samples` (a PictureSet) and write the result."""
    from ..image_scores import as_lines, write_result
    from ..networks.clip import clip_model
    from .prompts import prompts_of
    from .scores import score_captions

    weights = dict(args.weights)
    foreign = sorted(weights.keys() - set(protocol.roles))
    if foreign:
        raise ValueError(
            f"protocol {protocol.name} uses no weights {foreign[0]!r}: it uses {', '.join(protocol.roles)}"
        )
    if protocol.pretrained and (args.clip_pretrained or args.clip_model):
        raise ValueError(
            f"{protocol.name} is of {protocol.model}, {protocol.pretrained}: for another model run clip_score"
        )
    prompts = prompts_of(samples, args.prompts, keyed=protocol.keyed, whole=args.limit is None)
    model = clip_model(
        weights.get("clip"),
        model=args.clip_model or protocol.model,
        pretrained=args.clip_pretrained or protocol.pretrained,
        random_weights=args.random_weights,
        device=args.device,
    )
    with progress_bar(len(samples)) as bar:
        result = score_captions(
            samples,
            prompts,
            protocol,
            model,
            long_prompts=args.long_prompts,
            batch_size=args.batch_size,
            workers=args.workers,
            progress=bar.update,
        )
    write_result(result, Path(args.out))
    for line in as_lines(result):
        print(line)
    for note in result["warnings"]:
        print(f"mhla: {note}", file=sys.stderr)
    print(f"{args.out} written")
    return 0
