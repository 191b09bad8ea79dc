"""Do clips of moving emoji show the motion and the background that their prompts ask for?

    python eval/moving_emoji.py --list eval/prompts                                           # writes the list
    python eval/moving_emoji.py --paint outputs/real-clips                                    # real clips of the list
    python eval/moving_emoji.py --score outputs/real-clips --out outputs/real-clips.json      # the judge's own test
    python eval/moving_emoji.py --pipeline pipelines/wan-mhla-emoji --out outputs/clips.json  # draws, then scores

The first two need data/emoji64.tar, which train/build_emoji.py makes.

Motion is tracked in the pixels, by code that knows nothing of how clips are made. The protocol is in eval/README.md.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from mhla_diffusion.evaluation.moving.prompted import LIST, Prompt, read_prompts, rows, summary, table
from mhla_diffusion.evaluation.moving.scores import ScoredClip, score_clip
from mhla_diffusion.pipelines.painter import choose_device, choose_dtype
from mhla_diffusion.pipelines.pictures import write_atomically
from mhla_diffusion.pipelines.requests import Request, makes_videos
from mhla_diffusion.pipelines.video_painter import video_painter
from mhla_diffusion.pipelines.videos import as_frames, read_video, save_video
from mhla_diffusion.provenance import versions
from mhla_diffusion.training.moving_emoji import MOTIONS, MovingEmoji
from mhla_diffusion.weights import find_pipeline, fingerprint

SEED = 20261
EACH = {"heldout": 8, "train": 4}  # prompts of each motion
TRIES = 20000
SIZE, FPS = (17, 64, 64), 8


def chosen(data: str) -> list[Prompt]:
    """The same number of prompts for each motion; no caption twice, and no sprite twice where there are enough."""
    listed = []
    for split, each in EACH.items():
        source = MovingEmoji(data, split, seed=SEED)
        left = dict.fromkeys(MOTIONS, each)
        often = -(-each * len(MOTIONS) // len(source.planner.choices))  # how often one sprite has to serve
        captions, sprites = set(), Counter()
        for number in range(TRIES):
            plan = source.planner.plan(number)
            named = f"{plan.style} " in plan.caption
            if left[plan.motion] and named and plan.caption not in captions and sprites[plan.key] < often:
                left[plan.motion] -= 1
                captions.add(plan.caption)
                sprites[plan.key] += 1
                listed.append(Prompt(plan.caption, plan.motion, plan.background, plan.concept, split, number))
            if not any(left.values()):
                break
        else:
            raise ValueError(f"{data} has too few sprites of {split} for {each} prompts of each motion")
    return listed


def write_list(data: str, folder: Path) -> None:
    listed = chosen(data)
    text = "".join(json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in listed)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / LIST.name, lambda file: file.write(text.encode()))
    print(f"{len(listed)} prompts written to {folder / LIST.name}")


def paint(data: str, listed: dict[str, Prompt], folder: Path) -> None:
    """Real clips of the prompts, stored as those of `mhla generate` are."""
    sources = {split: MovingEmoji(data, split, seed=SEED) for split in EACH}
    for index, entry in enumerate(listed.values()):
        clips, (plan,) = sources[entry.split].clips([entry.number], SIZE)
        if plan.caption != entry.prompt:
            raise ValueError(
                f"{data} is another set than the list was made of: clip {entry.number} is {plan.caption!r} there"
            )
        frames = clips[0].permute(1, 2, 3, 0).numpy()
        save_video(frames, folder / f"{index:04d}.mp4", fps=FPS, settings={"prompt": entry.prompt, "seed": 0})
    print(f"{len(listed)} clips written to {folder}")


def scored(folder: Path, listed: dict[str, Prompt]) -> Iterator[ScoredClip]:
    """The clips in a folder whose prompts are listed."""
    for path in sorted(folder.glob("*.mp4")):
        video = read_video(path)
        entry = listed.get((video.settings or {}).get("prompt"))
        if entry is not None:
            yield score_clip(video.frames, entry, int(video.settings.get("seed", 0)))


def drawn(args: argparse.Namespace, listed: dict[str, Prompt], facts: dict) -> Iterator[ScoredClip]:
    """A clip of every prompt with every seed, as `mhla generate` makes it; notes in `facts` how it was made.

    Clip i of seed s starts from noise seeded 1000 s + i. Nothing is written but with --keep, so no encoder is needed.
    """
    folder = find_pipeline(args.pipeline)
    if not makes_videos(folder):
        raise ValueError(f"{folder} draws pictures, no videos: give the pipeline of a Wan or SANA-Video")
    device = choose_device(args.device)
    sha256, dtype = fingerprint(folder), choose_dtype("auto", device)
    painter = video_painter(folder)(folder, sha256, device, dtype)
    requests = [
        (Request(i, prompt, 1000 * seed + i, args.steps, args.guidance, dtype=dtype, suffix=".mp4"), seed)
        for seed in args.seeds
        for i, prompt in enumerate(listed)
    ]
    painter.check(requests[0][0])
    settings = painter.settings(requests[0][0])
    facts["pipeline"] = {"name": folder.name, "sha256": sha256}
    facts |= {
        name: settings[name] for name in ("steps", "guidance", "frames", "dtype", "device", "scheduler")
    }
    facts["seeds"] = args.seeds
    with tqdm(total=len(requests), unit="clip", disable=None) as bar:
        for start in range(0, len(requests), args.batch_size):
            batch = requests[start : start + args.batch_size]
            clips = painter.draw([request for request, _ in batch])
            for (request, seed), clip in zip(batch, clips, strict=True):
                if args.keep:
                    painter.save(clip, args.keep / request.file_name, request)
                yield score_clip(as_frames(clip), listed[request.prompt], seed)
            bar.update(len(batch))


def evaluate(args: argparse.Namespace, listed: dict[str, Prompt]) -> dict:
    """Scores of a folder's clips, or of those that the pipeline draws."""
    if args.limit:
        kept = [name for split in EACH for name, s in list(listed.items()) if s.split == split][: args.limit]
        listed = {name: listed[name] for name in kept}
    out = Path(args.out)
    facts = {}
    if args.pipeline:
        clips = list(drawn(args, listed, facts))
    else:
        if not Path(args.score).is_dir():
            raise ValueError(f"there is no folder {args.score}: give the one with the clips")
        facts["clips_of"] = Path(args.score).name
        clips = list(scored(Path(args.score), listed))
    if not clips:
        raise ValueError(f"{args.score or args.pipeline}: none of the clips has a prompt of the list")
    result = {
        "what": "share of clips whose measured motion and background are those of the prompt",
        **facts,
        "prompts_sha256": hashlib.sha256("\n".join(listed).encode()).hexdigest(),
        "scores": summary(clips),
        "versions": versions(),
        "clips": rows(clips),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda file: file.write(as_text(result).encode()))
    return result


def as_text(result: dict) -> str:
    """JSON, each clip in a line."""

    def dumped(value: object, **options: int) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **options)

    head = dumped({name: value for name, value in result.items() if name != "clips"}, indent=1).removesuffix(
        "\n}"
    )
    return f'{head},\n "clips": [\n  ' + ",\n  ".join(map(dumped, result["clips"])) + "\n ]\n}\n"


def seeds_of(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--seeds {text}: give whole numbers joined by commas, such as 0,1,2")
    return [int(part) for part in parts]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--list", type=Path, metavar="FOLDER", help="write the list of prompts into it")
    task.add_argument("--paint", type=Path, metavar="FOLDER", help="write real clips of the prompts into it")
    task.add_argument("--score", metavar="FOLDER", help="score the mp4 files in it")
    task.add_argument("--pipeline", help="draw the prompts with this pipeline, and score")
    parser.add_argument("--data", default="data/emoji64.tar", help="for --list and --paint")
    parser.add_argument("--prompts", type=Path, default=LIST, help="list of prompts")
    parser.add_argument("--out", default="outputs/moving_emoji.json", help="result (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="with --pipeline, write the clips there")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="default: the pipeline's")
    parser.add_argument("--guidance", type=float, help="default: the pipeline's")
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, default=0, help="of prompts, for a try")
    args = parser.parse_args()
    try:
        args.seeds = seeds_of(args.seeds)
        if args.list:
            write_list(args.data, args.list)
            return 0
        listed = read_prompts(args.prompts)
        if args.paint:
            paint(args.data, listed, args.paint)
            return 0
        result = evaluate(args, listed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    name = Path(args.score or args.pipeline).name
    for split, found in result["scores"].items():
        print(table({name: result["scores"]}, split))
        print(f"with shuffled prompts: motion {100 * found['motion_with_shuffled_prompts']:.1f} %")
    print(f"{args.out} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
