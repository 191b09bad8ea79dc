"""Keys of other checkpoints -> ours, as rules that match whole keys.

A rule pairs one original key with one or more of ours. `{i}` stands for the number of a layer, `{p}` for
`weight` or `bias`, `{all}` (ours only) for every layer: Diffusers' DiT keeps a copy of the embedders in each
layer. Nothing is matched by a part of its name, so `self_attn.o` never touches `self_attn.out_rmsnorm`.
The rules themselves are in `checkpoint_layouts.py`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

__all__ = [
    "CONVOLUTION_TO_MATRIX",
    "Change",
    "Layout",
    "Move",
    "Rule",
    "compressed",
    "expand",
    "rules",
    "shape_of",
]

_NAMES = {"i": r"(?P<i>0|[1-9]\d*)", "p": r"(?P<p>weight|bias)", "all": r"(?P<all>0|[1-9]\d*)"}
_PLACE = re.compile(r"\{(i|p|all)\}")


@dataclass(frozen=True)
class Change:
    """A change of values or shape on the way from the original key to ours."""

    name: str
    forward: Callable[[torch.Tensor], torch.Tensor]


# The released code keeps the matrix as a 1x1 convolution over blocks: rows are query blocks, as in ours.
CONVOLUTION_TO_MATRIX = Change("1x1 convolution to matrix", lambda w: w.flatten(1))


@dataclass(frozen=True)
class Rule:
    """`source`, an original key, becomes `targets`: with several, each takes an equal share of its rows."""

    source: str
    targets: tuple[str, ...]
    change: Change | None = None


def rules(table: Mapping[str, str | tuple[str, ...]]) -> tuple[Rule, ...]:
    return tuple(Rule(old, (new,) if isinstance(new, str) else new) for old, new in table.items())


def shape_of(shapes: Mapping[str, tuple[int, ...]], key: str) -> tuple[int, ...]:
    """Shape of one original key. Raises ValueError when the checkpoint lacks it."""
    if key not in shapes:
        raise ValueError(f"the checkpoint lacks {key}: it is not complete")
    return tuple(shapes[key])


@dataclass(frozen=True)
class Layout:
    """One way to name the weights of a model.

    `marks`: patterns of keys; a checkpoint that has a key for each of them, and none for `foreign`, is in
    this layout. `left_out`: patterns of keys that carry nothing the model needs, and why. `positions`: the key
    of a table that ours computes, hence compared instead of copied. `refused`: patterns of keys that change
    what the model computes in a way that ours has no place for, and why.
    `read_config(shapes, read, given)` gives the arguments of the model class: `read(key)` returns a tensor,
    `given` holds arguments that the caller knows.
    """

    name: str
    title: str
    model: str
    rules: tuple[Rule, ...]
    marks: tuple[str, ...]
    read_config: Callable[[Mapping[str, tuple[int, ...]], Callable[[str], torch.Tensor], Mapping], dict]
    foreign: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    positions: str | None = None

    def recognises(self, keys: Iterable[str]) -> bool:
        keys = list(keys)
        return all(any_match(mark, keys) for mark in self.marks) and not any(
            any_match(pattern, keys) for pattern in self.foreign
        )


@dataclass(frozen=True)
class Move:
    """One of our keys and where its values come from: part `part` of `parts` of an original key's rows."""

    target: str
    source: str
    part: int = 0
    parts: int = 1
    change: Change | None = None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Our tensor from the original one; works on the meta device too. Never copies what it can view."""
        if self.parts > 1:
            rows = tensor.shape[0] if tensor.ndim else 0
            if not rows or rows % self.parts:
                raise ValueError(
                    f"{self.source} of shape {tuple(tensor.shape)} does not divide into {self.parts} equal "
                    f"parts for {self.target}"
                )
            size = rows // self.parts
            tensor = tensor[self.part * size : (self.part + 1) * size]
        return tensor if self.change is None else self.change.forward(tensor)

    def describe(self) -> str:
        notes = [f"part {self.part + 1} of {self.parts}"] if self.parts > 1 else []
        return ", ".join(notes + ([self.change.name] if self.change else []))


def pattern(text: str) -> re.Pattern:
    """The regular expression of a rule's key; used with `fullmatch` only."""
    pieces = _PLACE.split(text)
    return re.compile("".join(_NAMES[x] if n % 2 else re.escape(x) for n, x in enumerate(pieces)))


def any_match(text: str, keys: Iterable[str]) -> bool:
    expression = pattern(text)
    return any(expression.fullmatch(key) for key in keys)


def filled(text: str, names: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda place: names[place[1]], text)


def first_match(table: Mapping[str, str], key: str) -> str | None:
    return next((why for text, why in table.items() if pattern(text).fullmatch(key)), None)


def layer_count(layout: Layout, keys: Iterable[str]) -> int:
    """Number of layers that the original keys belong to. Raises ValueError when one in between is missing."""
    sources = [pattern(rule.source) for rule in layout.rules if "{i}" in rule.source]
    found = {int(match["i"]) for key in keys for rule in sources if (match := rule.fullmatch(key))}
    absent = sorted(set(range(max(found, default=-1) + 1)) - found)
    if absent:
        raise ValueError(f"the checkpoint has layer {max(found)} but not {absent[0]}: it is not complete")
    return len(found)


def expand(layout: Layout, keys: Iterable[str]) -> tuple[list[Move], dict[str, str], list[str]]:
    """What happens to each original key: the moves, the keys left out with the reason, the unexpected keys.

    Raises ValueError on a key that `layout.refused` names.
    """
    keys = list(keys)
    layers = layer_count(layout, keys)
    rules = [(pattern(rule.source), rule) for rule in layout.rules]
    moves, left_out, unexpected = [], {}, []
    for key in keys:
        matched = [(rule, match) for expression, rule in rules if (match := expression.fullmatch(key))]
        if matched:
            rule, match = matched[0]
            for part, target in enumerate(rule.targets):
                for layer in range(layers) if "{all}" in target else [0]:
                    ours = filled(target, match.groupdict() | {"all": str(layer)})
                    moves.append(Move(ours, key, part, len(rule.targets), rule.change))
        elif why := first_match(layout.refused, key):
            raise ValueError(f"the checkpoint holds {key}, which cannot be converted: {why}")
        elif key == layout.positions:
            left_out[key] = "computed by the model; compared with it"
        elif why := first_match(layout.left_out, key):
            left_out[key] = why
        else:
            unexpected.append(key)
    return moves, left_out, unexpected


def compressed(keys: Iterable[str]) -> str:
    """Keys as a short list for a message: those that differ in the number of a layer alone become one."""
    groups: dict[str, list[int]] = {}
    for key in keys:
        match = re.search(r"(?<=\.)(?:0|[1-9]\d*)(?=\.)", key)
        name = f"{key[: match.start()]}{{}}{key[match.end() :]}" if match else key
        groups.setdefault(name, []).extend([int(match[0])] if match else [])
    words = []
    for name, numbers in groups.items():
        spans = _spans(sorted(numbers))
        words.append(name.replace("{}", spans if len(numbers) == 1 else f"{{{spans}}}") if numbers else name)
    return ", ".join(words)


def _spans(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def unexpected_message(place: str, keys: Sequence[str], layout: Layout) -> str:
    return (
        f"{place} holds {len(keys)} weights that {layout.title} has no place for: {compressed(keys)}; "
        "nothing is dropped silently, so give the layout that it is in with --from, or remove them"
    )
