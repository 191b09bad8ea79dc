"""Scores of clips that were drawn for a list of prompts, by hand."""

import json

import numpy as np
import pytest

from mhla_diffusion.evaluation.moving.prompted import (
    Prompt,
    read_prompts,
    rows,
    shuffled,
    summary,
    table,
)
from mhla_diffusion.evaluation.moving.scores import ScoredClip, score_clip
from mhla_diffusion.evaluation.moving.tracking import MOTIONS, Motion


def prompt(motion, split="heldout", background="green", name="a"):
    return Prompt(f"{name} {motion}", motion, background, name, split, 0)


def clip(asked, found, seed=0, background="green", flickering=1.0):
    return ScoredClip(asked, seed, Motion(found, background), flickering)


def test_scores_by_hand():
    right = [clip(prompt(m), m, seed) for m in ("up", "spin") for seed in (0, 1)]
    wrong = clip(prompt("down"), "up", flickering=0.4)
    colour = clip(prompt("up", background="red", name="b"), "up")
    found = summary([*right, wrong, colour])["heldout"]
    assert found["clips"] == 6 and found["prompts"] == 4
    assert found["motion"] == pytest.approx(5 / 6) and found["direction"] == pytest.approx(3 / 4)
    assert found["spin"] == 1 and found["grow"] is None and found["flickering"] == pytest.approx(0.9)
    assert found["background"] == pytest.approx(5 / 6) and found["motion_and_background"] == pytest.approx(
        4 / 6
    )
    assert found["motion_standard_error"] == pytest.approx(np.std([1, 1, 0, 1], ddof=1) / 2)
    assert found["measured"]["down"] == {"up": 1}
    assert set(found["seeds"]) == {"0", "1"} and found["seeds"]["1"]["motion"] == 1
    assert "train" not in summary(right)
    text = table({"hybrid": {"heldout": found}})
    assert "| hybrid | 6 | 83.3 % ± 25.0 | 75.0 % | – | 100.0 % |" in text
    json.dumps(rows([*right, wrong]), allow_nan=False)


def test_prompts_of_others_give_chance():
    clips = [clip(prompt(m, name=str(i)), m) for m in MOTIONS for i in range(40)]
    other = shuffled(clips)
    assert sorted(c.prompt.prompt for c in other) == sorted(c.prompt.prompt for c in clips)
    assert np.mean([c.motion_right for c in other]) == pytest.approx(1 / 12, abs=0.04)


def test_a_clip_is_measured_and_its_flickering_too():
    frames = np.zeros((5, 32, 32, 3), np.uint8)
    frames[:, 10:20, 10:20] = 200
    frames[1::2] += 10
    found = score_clip(frames, prompt("up"), seed=3)
    assert found.found.name == "still" and not found.motion_right and found.seed == 3
    assert found.flickering == pytest.approx(245 / 255)


def test_the_repository_list_is_balanced_and_others_are_refused(tmp_path):
    listed = read_prompts()
    for split, each in (("heldout", 8), ("train", 4)):
        own = [p for p in listed.values() if p.split == split]
        assert all(sum(p.motion == motion for p in own) == each for motion in MOTIONS)
        assert len({p.concept for p in own}) == len(own)
    with pytest.raises(ValueError, match="there is no list of prompts"):
        read_prompts(tmp_path / "none.jsonl")
    bad = tmp_path / "bad.jsonl"
    first = vars(next(iter(listed.values())))
    for text, message in (("{", "is no list of clips"), ("", "lists no prompt"),
                          (json.dumps({**first, "motion": "hover"}), "is not of its motion")):  # fmt: skip
        bad.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_prompts(bad)
