"""The figures in the cards of the shipped pipelines, and in the README, are those of the result files."""

import json
import re
from pathlib import Path

from mhla_diffusion.evaluation.moving.prompted import table
from mhla_diffusion.weights import fingerprint

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "eval" / "results"


def test_the_scores_of_the_shipped_pipeline_are_those_of_the_file():
    found = json.loads((RESULTS / "sana_mhla_emoji_scores.json").read_text())
    summary = found["pipelines"]["sana-mhla-emoji"]["summary"]

    def said(split: str, metric: str, places: int) -> str:
        row = summary[split][metric]
        assert row["seeds"] == 3
        return f"{row['mean']:.{places}f} ± {row['std']:.{places}f}"

    fid, fd = (found["floors"][scorer]["value"] for scorer in ("fid_adm", "fd_efficientnet"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"FID {said('train', 'fid_adm.fd', 1)} ({fid:.1f} between their halves of 3556)" in readme
    assert f"EfficientNet-Lite0 {said('train', 'fd_efficientnet.fd', 1)} ({fd:.1f})" in readme
    card = (ROOT / "pipelines" / "sana-mhla-emoji" / "README.md").read_text(encoding="utf-8")
    assert (
        f"| FID (Inception) | {said('train', 'fid_adm.fd', 2)} | {fid:.2f} | {said('heldout', 'fid_adm.fd', 2)} |"
        in card
    )
    assert (
        f"Lite0 | {said('train', 'fd_efficientnet.fd', 1)} | {fd:.1f} | {said('heldout', 'fd_efficientnet.fd', 1)} |"
        in card
    )
    assert f"draws {100 * summary['scenes']['emoji_geneval']['mean']:.0f} % as asked" in card
    guide = (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8")
    for words, metric in (("single object", "single_object"), ("place", "place"), ("counting", "counting")):
        assert re.search(rf"\| {words} \| [\d.]+ \| {said('scenes', metric, 2)} \|", guide)


def test_the_scores_and_ranks_of_the_twins_are_those_of_the_files():
    found = json.loads((RESULTS / "twins_emoji_scores.json").read_text())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    card = (ROOT / "pipelines" / "sana-mhla-emoji" / "README.md").read_text(encoding="utf-8")
    floors = (found["floors"][scorer]["value"] for scorer in ("fid_adm", "fd_efficientnet"))
    assert "halves of the training drawings FID is {:.1f}, Fréchet distance {:.1f}".format(*floors) in readme
    for kind, name in (("softmax", "softmax"), ("linear", "plain linear"), ("mhla", "MHLA")):
        summary = found["pipelines"][f"{kind}-0"]["summary"]

        def said(split: str, metric: str, places: int, summary=summary) -> str:
            row = summary[split][metric]
            assert row["seeds"] == 3
            return f"{row['mean']:.{places}f} ± {row['std']:.{places}f}"

        fid = [said(split, "fid_adm.fd", 2) for split in ("train", "heldout")]
        known = [said(split, "r_at_5", 3) for split in ("train", "heldout")]
        drawn = [name, fid[0], said("train", "fd_efficientnet.fd", 1), fid[1], *known]
        assert f"| {' | '.join(drawn)} |" in readme
        among = ", ".join(f"{summary[split]['r_at_5']['mean']:.3f}" for split in ("train", "heldout"))
        assert f"| {name} | {fid[0]} | {fid[1]} | {among} |" in card

    ranks = json.loads((RESULTS / "attention" / "attention.json").read_text())["pipelines"]
    guide = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    for pipeline, kind in [(name, entry["kind"]) for name, each in ranks.items() for entry in each["kinds"]]:
        (row,) = (entry for entry in ranks[pipeline]["kinds"] if entry["kind"] == kind)
        cells = [
            f"{row[figure]['mean']:.{places}f} ± {row[figure]['std']:.{places}f}"
            for figure, places in (("rank", 1), ("effective_rank", 1), ("entropy", 2))
        ]
        assert f"| {row['rank_bound']} | {' | '.join(cells)} |" in guide


def test_the_card_of_the_video_pipeline_says_what_was_measured_of_these_weights():
    found = json.loads((RESULTS / "moving_emoji.json").read_text(encoding="utf-8"))
    folder = ROOT / "pipelines" / "wan-mhla-emoji"
    assert found["pipeline"] == {"name": folder.name, "sha256": fingerprint(folder)}
    assert found["seeds"] == [0, 1, 2]
    card = (folder / "README.md").read_text(encoding="utf-8")
    scores = found["scores"]
    assert table({"this pipeline": scores}).splitlines()[-1] in card
    real = json.loads((RESULTS / "moving_emoji_real.json").read_text(encoding="utf-8"))["scores"]
    assert table({"real clips of these prompts": real}).splitlines()[-1] in card
    shuffled = scores["heldout"]["motion_with_shuffled_prompts"]
    assert f"With shuffled prompts {100 * shuffled:.1f} % of the motions are right" in card
    assert f"of split `train`, {100 * scores['train']['motion']:.1f} % of the motions are right" in card
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    motion, background = (f"{100 * scores['heldout'][name]:.1f} %" for name in ("motion", "background"))
    assert f"the motion that was asked for in {motion}, the background in {background}" in readme
    autoencoder = json.loads((RESULTS / "autoencoder_wan_emoji.json").read_text())["val"]
    assert f"reaches {autoencoder['psnr_db']['mean']:.1f} dB PSNR on clips" in card
    assert f"{autoencoder['object_psnr_db']:.1f} dB on the drawing alone" in card
    training = json.loads((RESULTS / "wan_mhla_emoji_training.json").read_text())
    first, second = training["runs"]
    words = f"{first['steps_run']} steps, then {second['steps_run']} from their averages, together"
    assert f"{words} {training['clips_seen'] / 1e6:.2f} million clips" in card
