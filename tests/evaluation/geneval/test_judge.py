"""GenEval's rules on detections made by hand."""

import pytest

from mhla_diffusion.evaluation.geneval.judge import (
    TASKS,
    Detection,
    TaskScore,
    judge,
    kept,
    overall,
    relations,
    task_scores,
)


def thing(name, score=0.95, x=0, y=0, size=10, color=None):
    return Detection(name, score, (x, y, x + size, y + size), color)


CUP, TWO_CUPS = [{"class": "cup", "count": 1}], [{"class": "cup", "count": 2}]


def test_a_detection_counts_above_the_threshold():
    assert judge([thing("cup", 0.31)], CUP).correct
    missed = judge([thing("cup", 0.3), thing("dog", 0.99)], CUP)
    assert not missed.correct and missed.reasons == ("expected cup>=1, found 0",)


def test_counting_asks_for_more_confidence_and_the_exact_number():
    exclude = [{"class": "cup", "count": 3}]
    two = [thing("cup", 0.91), thing("cup", 0.92)]
    assert judge(two, TWO_CUPS, exclude, counting=True).correct
    assert not judge(two[:1] + [thing("cup", 0.9)], TWO_CUPS, exclude, counting=True).correct
    many = judge([*two, thing("cup", 0.95)], TWO_CUPS, exclude, counting=True)
    assert many.reasons == ("expected cup<3, found 3",)
    assert judge([*two, thing("cup", 0.9)], TWO_CUPS, exclude, counting=True).correct
    # Elsewhere a third object of the class does no harm.
    assert judge([*two, thing("cup", 0.95)], TWO_CUPS).correct


def test_at_most_sixteen_of_a_class_the_most_confident_first():
    many = [thing("cup", 0.4 + i / 100) for i in range(20)]
    groups = kept(many)
    assert len(groups["cup"]) == 16 and groups["cup"][0].score == many[-1].score
    assert not judge(many, [{"class": "cup", "count": 17}]).correct


def test_colours_of_the_most_confident_objects_are_asked():
    asked = [{"class": "cup", "count": 1, "color": "red"}]
    red, blue = thing("cup", 0.6, color="red"), thing("cup", 0.8, color="blue")
    assert judge([red], asked).correct
    assert judge([red, blue], asked).reasons == ("expected red cup>=1, found blue",)
    assert judge([red, blue], [{"class": "cup", "count": 2}]).correct
    assert not judge([red, blue], [{"class": "cup", "count": 2, "color": "red"}]).correct
    with pytest.raises(ValueError, match='give detections with "color"'):
        judge([thing("cup")], asked)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (-50, 0, {"left of"}),
        (50, 0, {"right of"}),
        (0, -50, {"above"}),
        (0, 50, {"below"}),
        (-50, -50, {"left of", "above"}),
        (50, 20, {"right of"}),
        (1, 1, set()),  # within a tenth of both sizes
        (2, 0, set()),  # just at it
        (4, 0, set()),  # what is left is half of the offset, not more
        (4.1, 0, {"right of"}),
    ],
)
def test_relations_of_boxes(x, y, expected):
    assert relations((x, y, x + 10, y + 10), (0, 0, 10, 10)) == expected
    mirrored = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert relations((0, 0, 10, 10), (x, y, x + 10, y + 10)) == {mirrored[each] for each in expected}


def test_positions_are_relative_to_an_earlier_requirement():
    asked = [{"class": "dog", "count": 1}, {"class": "cup", "count": 1, "position": ["left of", 0]}]
    assert judge([thing("dog", x=50), thing("cup")], asked).correct
    wrong = judge([thing("dog"), thing("cup", x=50)], asked)
    assert wrong.reasons == ("expected cup left of dog, found right of",)
    same = judge([thing("dog"), thing("cup")], asked)
    assert same.reasons == ("expected cup left of dog, found neither",)
    lone = judge([thing("cup")], asked)
    assert lone.reasons == ("expected dog>=1, found 0", "no target for cup to be left of")
    # A target whose colour is wrong is none.
    red = [asked[0] | {"color": "red"}, asked[1]]
    assert "no target for cup" in judge([thing("dog", x=50, color="blue"), thing("cup")], red).reasons[1]


def test_every_object_must_be_in_place():
    asked = [{"class": "dog", "count": 2}, {"class": "cup", "count": 1, "position": ["above", 0]}]
    dogs = [thing("dog", y=50), thing("dog", y=60, x=12)]
    assert judge([*dogs, thing("cup")], asked).correct
    assert not judge([dogs[0], thing("dog", x=80), thing("cup")], asked).correct


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ([{"class": "cup"}], "is no requirement"),
        ([{"class": "cup", "count": 0}], "from 1 on"),
        ([{"class": "cup", "count": 1, "position": ["beside", 0]}], "no relation is called 'beside'"),
        ([{"class": "cup", "count": 1, "position": ["above", 0]}], "does not stand before it"),
    ],
)
def test_what_is_no_requirement_is_refused(include, message):
    with pytest.raises(ValueError, match=message):
        judge([thing("cup")], include)


def test_the_overall_score_is_the_mean_of_tasks_not_of_pictures():
    rows = [(task, "p", True) for task in TASKS[1:]]
    rows += [("single_object", f"p{i}", i == 0) for i in range(4)]
    scores = task_scores(rows)
    assert scores["single_object"] == TaskScore(0.25, 4, 4, 0.25)
    assert overall(scores) == pytest.approx((5 + 0.25) / 6)
    assert sum(correct for *_, correct in rows) / len(rows) != pytest.approx(overall(scores))
    assert overall({"counting": scores["counting"]}) is None
    assert overall({"counting": scores["counting"]}, ("counting",)) == 1


def test_prompts_with_a_right_picture():
    rows = [("counting", "a", True), ("counting", "a", False), ("counting", "b", False)]
    assert task_scores(rows)["counting"] == TaskScore(pytest.approx(1 / 3), 3, 2, 0.5)
