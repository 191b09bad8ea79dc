"""`mhla eval run` for protocols of pictures and prompts: what is typed, checked and handed to the library."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..networks.weight_files import find_weights
from .protocols import TEXT_IMAGE_PROTOCOLS, TextImageProtocol


def add_text_image_options(parser) -> None:
    """Options of `mhla eval run` that only these protocols read."""
    group = parser.add_argument_group(f"pictures and prompts ({', '.join(TEXT_IMAGE_PROTOCOLS)})")
    add = group.add_argument
    add("--prompts", metavar="FILE",
        help="MJHQ's meta_data.json, .jsonl of {file, prompt}, .txt (default: what the pictures carry)")  # fmt: skip
    add("--long-prompts", choices=("truncate", "error"),
        help="what becomes of prompts with too many tokens (default: truncate)")  # fmt: skip
    add("--clip-model", metavar="NAME", help="open_clip's name of the model in a file of weights")
    add("--clip-pretrained", metavar="NAME", help="open_clip's name of those weights, for example openai")
    add("--random-weights", action="store_true", help="try out without weights; numbers mean nothing")


def run_text_image(args: argparse.Namespace, protocol: TextImageProtocol, opened, progress_bar) -> int:
    """Score what `opened()` opens and write the result."""
    if protocol.pretrained and (args.clip_pretrained or args.clip_model):
        raise ValueError(
            f"{protocol.name} is of {protocol.model}, {protocol.pretrained}: for another model run clip_score"
        )
    weights = dict(args.weights)
    if not args.random_weights and weights.keys() <= {*protocol.roles, *protocol.optional}:
        # Said before torch is imported, which takes seconds.
        roles = protocol.roles
        if protocol.kind == "detections" and args.prompts is not None:
            from ..geneval.records import needed_weights

            roles += needed_weights(args.samples, args.prompts)
        for role in roles:
            find_weights(role, weights.get(role))
    from ..decoding import decoding_processes
    from ..image_scores import as_lines, write_result
    from ..protocols.drawn import note_drawing
    from .run import score_set

    out = Path(args.out)
    with progress_bar(None) as progress:
        result = score_set(
            protocol,
            args.samples,
            opened,
            prompts=args.prompts,
            whole=args.limit is None,
            weights=weights,
            device=args.device,
            long_prompts=args.long_prompts or "truncate",
            clip_model_name=args.clip_model,
            clip_pretrained=args.clip_pretrained,
            random_weights=args.random_weights,
            detections_out=out.with_name(f"{out.stem}_detections.jsonl"),
            batch_size=args.batch_size,
            workers=decoding_processes(args.workers, args.device),
            progress=progress,
        )
    note_drawing(result, args.samples)
    for line in as_lines(result):
        print(line)
    for note in result["warnings"]:
        print(f"mhla: {note}", file=sys.stderr)
    write_result(result, out)
    print(f"{args.out} written")
    return 0
