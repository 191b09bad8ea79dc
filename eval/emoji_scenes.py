"""The list of scenes by which pipelines of emoji are judged, and real pictures of them, the judge's own test.

    python eval/emoji_scenes.py --data data/emoji64.tar --out eval/prompts        # writes the list
    python eval/emoji_scenes.py --data data/emoji64.tar --paint outputs/real-scenes

Each task has 50 prompts. Single objects are of split `heldout` (a known concept in a style it was never shown in), all
others of `train`, put together anew. The painted pictures carry their prompts, as those of `mhla generate` do.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mhla_diffusion.evaluation.emoji_world.scenes import LIST, Scene, check_scene
from mhla_diffusion.pipelines.pictures import SETTINGS_KEY, write_atomically
from mhla_diffusion.training.emoji import BACKGROUNDS, Sprites, caption_of, load_sprites, on_background
from mhla_diffusion.training.emoji_scenes import ScenePainter, ScenePlanner

SEED = 20261
COLOURS = [name for name in BACKGROUNDS if name != "white"]


def singles(
    sprites: Sprites, number: int, tag: str, rng: np.random.Generator
) -> list[tuple[Scene, np.ndarray]]:
    """One drawing: on white, or for `colors` on a colour that the caption names."""
    found, seen = [], set()
    for index in rng.permutation(len(sprites)):
        record = sprites.records[index]
        if record["concept"] in seen or record["group"] in ("flags", "symbols"):
            continue
        seen.add(record["concept"])
        background = COLOURS[len(found) % len(COLOURS)] if tag == "colors" else "white"
        scene = Scene(
            caption_of(record, background),
            tag,
            [{"class": record["concept"], "count": 1}],
            background=background if tag == "colors" else None,
        )
        found.append((scene, on_background(sprites.rgba[index], background)))
        if len(found) == number:
            break
    return found


def composed(sprites: Sprites, number: int, tag: str) -> list[tuple[Scene, np.ndarray]]:
    """Several drawings, or one in a place."""
    kind = {"two_object": "list", "counting": "count", "position": "relation", "place": "place"}[tag]
    planner = ScenePlanner(sprites, seed=SEED)
    plans, prompts, sample = [], set(), 0
    while len(plans) < number:
        plan = planner.plan(sample, kind)
        sample += 1
        objects = plan.truth["objects"]
        fits = plan.truth["background"] != "white" and plan.caption not in prompts
        fits &= len({each["concept"] for each in objects}) == len(objects)
        fits &= tag != "two_object" or len(objects) == 2
        fits &= tag != "counting" or objects[0]["count"] > 1
        if fits:
            prompts.add(plan.caption)
            plans.append(plan)
    pictures = ScenePainter(sprites, 64).paint(plans)
    return [(scene_of(plan, tag), picture) for plan, picture in zip(plans, pictures, strict=True)]


def scene_of(plan, tag: str) -> Scene:
    objects = plan.truth["objects"]
    include = [{"class": each["concept"], "count": each["count"]} for each in objects]
    exclude = []
    if tag == "counting":
        exclude = [{"class": include[0]["class"], "count": include[0]["count"] + 1}]
    if tag == "position":  # "A left of B": A is judged relative to B, which therefore stands first
        include = [include[1], include[0] | {"position": [plan.truth["relation"], 0]}]
    place = objects[0]["place"] if tag == "place" else None
    return Scene(plan.caption, tag, include, exclude, plan.truth["background"], place)


def scenes(data: str, number: int) -> list[tuple[Scene, np.ndarray]]:
    train, heldout = load_sprites(data, "train"), load_sprites(data, "heldout")
    rng = np.random.default_rng(SEED)
    known = {record["concept"] for record in train.records}
    heldout = heldout.select(i for i, record in enumerate(heldout.records) if record["concept"] in known)
    found = singles(heldout, number, "single_object", rng)
    for tag in ("two_object", "counting"):
        found += composed(train, number, tag)
    found += singles(train, number, "colors", rng)
    for tag in ("position", "place"):
        found += composed(train, number, tag)
    for scene, _ in found:
        check_scene(scene)
    return found


def as_record(scene: Scene) -> dict:
    return {key: value for key, value in vars(scene).items() if value not in (None, [])}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="data/emoji64.tar", help="the emoji set (default: %(default)s)")
    add("--number", type=int, default=50, help="prompts for each task (default: %(default)s)")
    add("--out", metavar="FOLDER", help="write emoji_scenes.jsonl and .txt, one prompt a line, there")
    add("--paint", metavar="FOLDER", help="write the real pictures there")
    args = parser.parse_args()
    if not (args.out or args.paint):
        parser.error("nothing to do: give --out or --paint")
    try:
        found = scenes(args.data, args.number)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.out:
        lines = [json.dumps(as_record(scene), ensure_ascii=False) for scene, _ in found]
        prompts = [scene.prompt for scene, _ in found]
        for name, content in ((LIST.name, lines), (LIST.with_suffix(".txt").name, prompts)):
            path = Path(args.out) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = "\n".join(content) + "\n"
            write_atomically(path, lambda file, text=text: file.write(text.encode()))
        print(f"{len(found)} scenes written to {args.out}")
    if args.paint:
        folder = Path(args.paint)
        folder.mkdir(parents=True, exist_ok=True)
        for number, (scene, picture) in enumerate(found):
            info = PngInfo()
            info.add_text(SETTINGS_KEY, json.dumps({"prompt": scene.prompt}))
            Image.fromarray(picture).save(folder / f"{number:04d}.png", pnginfo=info)
        print(f"{len(found)} pictures written to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
