"""Names of the classes of a class-conditional pipeline."""

import re

from diffusers import DiTPipeline

__all__ = ["WHOLE_NUMBER", "check_label_names", "label_names"]

WHOLE_NUMBER = re.compile(r"-?\d{1,18}")


def label_names(pipeline: DiTPipeline) -> dict[int, str]:
    """`id2label` of a pipeline, out of the labels that it looks up."""
    names: dict[int, list[str]] = {}
    for name, number in pipeline.labels.items():
        names.setdefault(number, []).append(name)
    return {number: ", ".join(names[number]) for number in sorted(names)}


def check_label_names(id2label, classes: int) -> None:
    """Raise ValueError unless `id2label` is None or gives classes, by number, their names as texts."""
    if id2label is None:
        return
    if not isinstance(id2label, dict):
        raise ValueError(f'id2label={id2label!r}: give a dict such as {{0: "goldfish"}}, or None')
    for number, names in id2label.items():
        whole = WHOLE_NUMBER.fullmatch(str(number))  # a JSON file has texts for keys
        named = isinstance(names, str) and all(name.strip() for name in names.split(","))
        if not (whole and 0 <= int(number) <= classes and named):
            raise ValueError(
                f"id2label has {number!r}: {names!r}; give a class number from 0 to {classes - 1} and its name, or "
                "names joined by commas"
            )
