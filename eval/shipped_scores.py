"""Scores pipelines of emoji by the protocols `emoji` and `emoji_scenes`: draws from several seeds, scores, and sums up.

    python eval/shipped_scores.py                                        # the shipped pipeline; use a GPU
    python eval/shipped_scores.py sana-mhla-emoji runs/twins/runs/*/pipeline
    python eval/shipped_scores.py --draw-only --drawn path/to/drawn      # draws on one machine ...
    python eval/shipped_scores.py --score-only --drawn path/to/drawn     # ... and scores on another

Of each pipeline and seed one tar of lossless pictures is drawn: captions of splits `train` and `heldout` on white, and
the prompts of eval/prompts/emoji_scenes.txt. `mhla eval run emoji --samples TAR --samples-split train` scores it, too.
What is drawn or scored already is not done again. What lacks its weights is left out, and named in the result.
"""

import argparse
import hashlib
import io
import json
import sys
import tarfile
import time
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from mhla_diffusion.evaluation.diagnostics.commands import labels
from mhla_diffusion.evaluation.emoji_world.naming import Namer
from mhla_diffusion.evaluation.emoji_world.scenes import LIST, read_scenes
from mhla_diffusion.evaluation.emoji_world.scores import score_retrieval, score_scenes
from mhla_diffusion.evaluation.emoji_world.seed_tables import NEAREST, as_markdown, summed_up
from mhla_diffusion.evaluation.faults import MissingWeights
from mhla_diffusion.evaluation.gathering import Gathered, gather
from mhla_diffusion.evaluation.image_protocols import PROTOCOLS
from mhla_diffusion.evaluation.image_scores import build_extractor, score, write_result
from mhla_diffusion.evaluation.kept import Kept
from mhla_diffusion.evaluation.networks.weight_files import sha256_of
from mhla_diffusion.evaluation.picture_sets import open_pictures
from mhla_diffusion.evaluation.protocols.files import load_protocol
from mhla_diffusion.evaluation.text_image.prompts import Prompts, prompts_of
from mhla_diffusion.pipelines.painter import Painter, choose_device, choose_dtype
from mhla_diffusion.pipelines.pictures import write_atomically
from mhla_diffusion.pipelines.requests import Request, read_prompts
from mhla_diffusion.provenance import DISTRIBUTIONS, versions
from mhla_diffusion.training.emoji import load_sprites
from mhla_diffusion.weights import DEFAULT_PIPELINE, find_pipeline, fingerprint

SETS = {"train": "emoji", "heldout": "emoji", "scenes": "emoji_scenes"}  # set -> protocol
CHOICE = 20261  # seed of which captions of `train` are drawn
FIRST_SEED = 100_000  # picture i of seed s starts from noise seeded FIRST_SEED * s + i
MANIFEST = "manifest.json"
REAL = "real drawings"


def asked(data: str, number: int, limit: int | None) -> dict[str, list[tuple[str, str | None]]]:
    """Caption and concept of what is drawn in each set; the same for all pipelines, whatever the file's order."""
    train, heldout = load_sprites(data, "train").records, load_sprites(data, "heldout").records
    known = {record["concept"] for record in train}
    chosen = sorted((record["caption"], record["concept"]) for record in train)
    order = np.random.default_rng(CHOICE).permutation(len(chosen))[:number]
    found = {
        "train": [chosen[i] for i in order],
        "heldout": sorted((r["caption"], r["concept"]) for r in heldout if r["concept"] in known),
        "scenes": [(prompt, None) for prompt in read_prompts(LIST.with_suffix(".txt"))],
    }
    return {name: prompts[:limit] for name, prompts in found.items()}


def read_manifest(path: Path) -> dict:
    with tarfile.open(path) as archive:
        return json.loads(archive.extractfile(MANIFEST).read())


def as_webp(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=True, method=6)
    return buffer.getvalue()


def draw(path: Path, painter: Painter, seed: int, sets: dict, args, bar: tqdm) -> None:
    """Writes the tar of one pipeline and seed: pictures as `mhla generate` makes them, each with a JSON."""
    listed = [(name, *each) for name, prompts in sets.items() for each in prompts]
    requests = [
        Request(i, caption, FIRST_SEED * seed + i, dtype=painter.dtype)
        for i, (_, caption, _) in enumerate(listed)
    ]
    started, encoded = time.perf_counter(), []
    with ThreadPoolExecutor() as pool:
        for first in range(0, len(requests), args.batch_size):
            part = requests[first : first + args.batch_size]
            encoded += [pool.submit(as_webp, picture) for picture in painter.draw(part)]
            bar.update(len(part))
    settings = painter.settings(requests[0])
    manifest = {
        "sets": {name: len(prompts) for name, prompts in sets.items()},
        "prompts_sha256": digest(sets),
        "seconds": round(time.perf_counter() - started, 1),
        "drawn": {
            **{name: settings[name] for name in settings if name not in ("prompt", "seed", "defaults")},
            "noise": f"picture i of seed s from {FIRST_SEED} s + i",
            "batch_size": args.batch_size,
        },
    }
    files = {MANIFEST: json.dumps(manifest).encode()}
    for request, (name, caption, concept), picture in zip(requests, listed, encoded, strict=True):
        record = {"caption": caption, "concept": concept, "split": name, "seed": request.seed}
        files[f"{request.index:06d}.json"] = json.dumps(record).encode()
        files[f"{request.index:06d}.webp"] = picture.result()

    def write(file) -> None:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)


def digest(sets: dict) -> str:
    return hashlib.sha256(json.dumps(sets).encode()).hexdigest()


def draw_all(folders: dict[str, Path], sets: dict, args) -> None:
    """Draws what is not there. Raises ValueError for a tar that was drawn from other weights or prompts."""
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    pictures = sum(map(len, sets.values()))
    with tqdm(total=pictures * len(folders) * len(args.seeds), unit="picture") as bar:
        for label, folder in folders.items():
            sha256, painter = fingerprint(folder), None
            for seed in args.seeds:
                path = args.drawn / f"{label}.{seed}.tar"
                if path.is_file():
                    found = read_manifest(path)
                    wanted = (sha256, digest(sets))
                    if (found["drawn"]["pipeline_sha256"], found["prompts_sha256"]) != wanted:
                        raise ValueError(
                            f"{path} was drawn by other weights or of other prompts: remove it, or give another --drawn"
                        )
                    bar.update(pictures)
                    continue
                if painter is None:
                    painter = Painter(folder, sha256, device, dtype)
                    painter.pipe.set_progress_bar_config(disable=True)
                bar.set_description(f"{label}, seed {seed}")
                draw(path, painter, seed, sets, args, bar)


class Judge:
    """The protocols' scorers with their networks, each loaded once; `lacking` says which could not be, and why."""

    def __init__(self, args):
        self.args, self.networks, self.namer = args, {}, None
        self.reference = open_pictures(args.data, split="train", background="white")
        self.gathered: dict[str, Gathered] = {}  # of the reference, by scorer
        self.lacking = dict.fromkeys(args.without, "not asked for (--without)")
        try:
            self.namer = Namer(device=args.device)
        except ValueError as error:  # MissingWeights, or a package that is not installed
            self.lacking |= dict.fromkeys(("emoji_retrieval", "emoji_scenes"), str(error))
        for part in load_protocol("emoji").parts:
            if part.scorer in PROTOCOLS.keys() - self.lacking.keys():
                try:
                    found = build_extractor(PROTOCOLS[part.scorer], {}, args.device, part.metrics)
                    self.networks[part.scorer] = found
                except ValueError as error:
                    self.lacking[part.scorer] = str(error)

    def reference_by(self, scorer: str) -> Gathered:
        """What a network finds in the reference: passed once for all tars, and kept below --drawn for the next run."""
        if scorer not in self.gathered:
            network, batch_size = self.networks[scorer], self.args.score_batch_size
            decides = {
                "features": network.about,
                "device": str(network.device),
                "torch": torch.__version__,
                "pictures": sha256_of(Path(self.args.data)),
            }
            kept = Kept(self.args.drawn / "features", decides, lambda text: print(text, file=sys.stderr))
            how = {"moments": network.taps.keys(), "features": network.taps.keys(), "batch_size": batch_size}
            self.gathered[scorer] = gather(self.reference, network, **how, kept=kept)
        return self.gathered[scorer]

    def score(self, part, source: Path, split: str) -> dict:
        """Result of one part of a protocol for one split of a tar. Raises MissingWeights."""
        if part.scorer in self.lacking:
            raise MissingWeights(self.lacking[part.scorer])
        how = {"batch_size": self.args.score_batch_size}
        samples = open_pictures(source, split=split, background="white")
        if part.scorer in PROTOCOLS:
            how |= {"extractor": self.networks[part.scorer], "gathered": self.reference_by(part.scorer)}
            how |= {"metrics": part.metrics, "floor": split == "train"}
            return score(samples, self.reference, PROTOCOLS[part.scorer], **how)
        texts = prompts_of(samples, None)
        if part.scorer == "emoji_scenes":
            return score_scenes(samples, texts, read_scenes(), self.namer, **how)
        # By the set's own names of concepts, all of which the heads know: some captions word them otherwise.
        texts = Prompts([record["concept"] for record in samples.records], texts.about)
        return score_retrieval(samples, texts, self.namer, **how)


KEPT = ("values", "floor", "warnings", "features", "environment")


def score_all(tars: dict[tuple[str, int], Path], args) -> tuple[dict, dict]:
    """(label, seed) -> set -> scorer -> result, that of real held-out drawings among them; and what was left out."""
    jobs = [(label, seed, name, path) for (label, seed), path in tars.items() for name in SETS]
    jobs.append((REAL, 0, "heldout", Path(args.data)))
    scored: dict = {}
    skipped: dict[str, str] = {}
    judge = Judge(args)
    reference = sha256_of(Path(args.data))
    with tqdm(total=len(jobs), unit="set") as bar:
        for label, seed, name, path in jobs:
            bar.set_description(f"{label}, seed {seed}, {name}")
            protocol, drawn = load_protocol(SETS[name]), sha256_of(path)
            for part in protocol.parts:
                kept = args.drawn / "scores" / f"{label}.{seed}.{name}.{part.scorer}.json"
                made_of = [drawn, reference, protocol.sha256]
                found = json.loads(kept.read_text()) if kept.is_file() else {}
                if found.get("made_of") != made_of:
                    try:
                        result = judge.score(part, path, name)
                    except MissingWeights as error:
                        skipped[part.scorer] = str(error)
                        continue
                    found = {key: result[key] for key in KEPT if key in result} | {"made_of": made_of}
                    write_result(found, kept)
                scored.setdefault((label, seed), {}).setdefault(name, {})[part.scorer] = found
            bar.update()
    return scored, skipped


def flat(parts: dict[str, dict]) -> dict[str, dict]:
    """Metrics of all scorers; those of distances with their scorer's name before them."""
    return {
        f"{scorer}.{metric}" if scorer in PROTOCOLS else metric: row
        for scorer, found in parts.items()
        for metric, row in found["values"].items()
    }


def result_of(tars: dict[tuple[str, int], Path], scored: dict, skipped: dict, args) -> dict:
    """The result file: of each pipeline how it was drawn, every seed's values and what they come to."""
    pipelines, warnings, floors, networks, devices = {}, {}, {}, {}, set()
    for (label, seed), sets in scored.items():
        entry = pipelines.setdefault(label, {"drawn": {}, "seeds": {}})
        if (label, seed) in tars:
            manifest = read_manifest(tars[label, seed])
            entry |= {key: manifest[key] for key in ("sets", "prompts_sha256", "drawn")}
        entry["seeds"][str(seed)] = {name: flat(parts) for name, parts in sets.items()}
        for name, parts in sets.items():
            for scorer, found in parts.items():
                networks[scorer] = found["features"]
                devices.add(found["environment"]["device"])
                if "floor" in found:
                    floors[scorer] = found["floor"]["pool"]
                if found["warnings"]:
                    warnings.setdefault(f"{name}.{scorer}", found["warnings"])
    for entry in pipelines.values():
        names = next(iter(entry["seeds"].values()))
        entry["summary"] = {name: summed_up([run[name] for run in entry["seeds"].values()]) for name in names}
    return {
        "schema_version": 1,
        "what": "Pictures drawn from several seeds, scored by the protocols emoji and emoji_scenes",
        "pipelines": pipelines,
        "floors": floors,  # of even against odd pictures of the reference
        "skipped": skipped,
        "warnings": warnings,
        "protocols": {name: load_protocol(name).sha256 for name in sorted(set(SETS.values()))},
        "reference": {"file": Path(args.data).name, "split": "train", "sha256": sha256_of(Path(args.data))},
        "captions_seed": CHOICE,
        "features": networks,
        "environment": {
            "scored_on": sorted(devices),
            "versions": versions((*DISTRIBUTIONS, "torchmetrics")),
        },
    }


def report(result: dict) -> str:
    """The tables, and what was left out."""
    summaries = {label: entry["summary"] for label, entry in result["pipelines"].items()}
    floors = {scorer: floor["value"] for scorer, floor in result["floors"].items()}
    rows = [
        row
        for entry in result["pipelines"].values()
        for sets in entry["seeds"].values()
        for values in sets.values()
        for metric, row in values.items()
        if metric == NEAREST
    ]
    lines = as_markdown(summaries, floors, rows[0]["reference_median"] if rows else None)
    lines += [f"Left out: {scorer}: {' '.join(why.split())}" for scorer, why in result["skipped"].items()]
    return "\n".join(lines).rstrip() + "\n"


def found_tars(folder: Path, wanted: Container[str] | None, seeds: Container[int]) -> dict:
    """(label, seed) -> tar in a folder, of the pipelines that are wanted, None: of all."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        label, _, seed = path.stem.rpartition(".")
        if seed.isdigit() and int(seed) in seeds and (wanted is None or label in wanted):
            found[label, int(seed)] = path
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("pipelines", nargs="*", help=f"folders or names (default: {DEFAULT_PIPELINE})")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    add("--captions", type=int, default=2048, help="of split train that are drawn (default: %(default)s)")
    add("--limit", type=int, help="only the first N prompts of each set, to try it out")
    add("--data", default="data/emoji64.tar", help="the emoji set (default: %(default)s)")
    add("--drawn", type=Path, default=Path("outputs/shipped_scores"), help="folder (default: %(default)s)")
    add("--out", type=Path, default=Path("outputs/scores.json"), help=".md beside it (default: %(default)s)")
    add("--draw-only", action="store_true", help="score nothing")
    add("--score-only", action="store_true", help="score all that lies in --drawn")
    add("--without", nargs="+", default=[], metavar="SCORER", help="leave these out, e.g. fid_adm on a CPU")
    add("--batch-size", type=int, default=256, help="pictures drawn at a time (default: %(default)s)")
    add("--score-batch-size", type=int, default=128, help="pictures scored at a time (default: %(default)s)")
    add("--device", default="auto")
    add("--dtype", default="auto", help="of drawing (default: bfloat16 on a GPU, else float32)")
    args = parser.parse_args()
    try:
        if args.draw_only and args.score_only:
            raise ValueError("--draw-only and --score-only leave nothing to do: give one of them")
        folders = None
        if not args.score_only:
            names = args.pipelines or [DEFAULT_PIPELINE]
            folders = {label: find_pipeline(name) for label, name in zip(labels(names), names, strict=True)}
            draw_all(folders, asked(args.data, args.captions, args.limit), args)
        if args.draw_only:
            return 0
        tars = found_tars(args.drawn, folders, args.seeds)
        if not tars:
            raise ValueError(f"{args.drawn} holds no drawn pictures: leave out --score-only")
        scored, skipped = score_all(tars, args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    result = result_of(tars, scored, skipped, args)
    write_result(result, args.out)
    text = report(result)
    write_atomically(args.out.with_suffix(".md"), lambda file: file.write(text.encode()))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
