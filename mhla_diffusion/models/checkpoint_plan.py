"""What a conversion will do, worked out from keys, shapes and configs before any weight is copied."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..mixing import interpolate_mixing
from .checkpoint_config import (
    checked_arguments,
    class_and_arguments,
    family_named,
    layer_number,
    without_values,
)
from .checkpoint_layouts import find_layout
from .checkpoints import Change, Layout, Move, compressed, expand, unexpected_message
from .convert import Family
from .mixin import MHLAModelMixin
from .options import check_block_grid, check_values, chosen_layers
from .tensor_files import Entry, TensorFile, is_finite

__all__ = ["Plan", "make_plan"]

MIXING = ".attn1.mixing.weight"
# Fields of a config that have an option of their own.
OPTION_OF = {
    "mhla_layers": "layers",
    "mhla_block_grid": "block-grid",
    "mhla_gate": "gate",
    "mhla_local_conv": "local-conv",
}


@dataclass
class Plan:
    """A converted model without values (on the meta device), and where each value will come from."""

    model: MHLAModelMixin
    family: Family
    layout: Layout | None
    files: Sequence[TensorFile]
    moves: dict[str, tuple[TensorFile, Move]]
    new: list[str]
    left_out: dict[str, str]
    grids: tuple[tuple[int, ...], tuple[int, ...]]  # block grid before and after
    drift: dict[str, float] = field(default_factory=dict)  # round-trip error of each interpolated matrix

    def entries(self) -> list[list[Entry]]:
        """What to write, one list for each file that is read; new weights come with the last one."""
        expected = self.model.state_dict()
        lists: list[list[Entry]] = [[] for _ in self.files]
        place = {id(file): n for n, file in enumerate(self.files)}
        for key, (file, move) in self.moves.items():
            dtype = torch.float32 if key.endswith(MIXING) else file.specs[move.source][1]

            def values(file=file, move=move):
                return finite(move.take(file.read(move.source)), file, move.source)

            lists[place[id(file)]].append(Entry(key, tuple(expected[key].shape), dtype, values))
        for key in self.new:
            lists[-1].append(
                Entry(key, tuple(expected[key].shape), expected[key].dtype, lambda key=key: self.start(key))
            )
        return lists

    def check_values(self) -> None:
        """Read every weight of the files once. Raises ValueError on one that is not finite."""
        for entries in self.entries():
            for entry in entries:
                if entry.key in self.moves:
                    entry.make()

    def start(self, key: str) -> torch.Tensor:
        """The documented start of one new weight."""
        self.model.initialise_new_weights([key], device="cpu")
        value = self.model.get_parameter(key).detach()
        self.model.get_submodule(key.rpartition(".")[0]).to("meta")  # keeps one weight in memory at a time
        return value

    def key_map(self) -> list[str]:
        """One line for each weight: where it comes from and what it becomes."""
        expected = self.model.state_dict()
        lines = []
        for key, (_, move) in self.moves.items():
            note = f" ({move.describe()})" if move.describe() else ""
            lines.append(f"{move.source} -> {key} {tuple(expected[key].shape)}{note}")
        lines += [f"(new) -> {key} {tuple(expected[key].shape)}" for key in self.new]
        return lines + [f"{key} -> (left out: {why})" for key, why in self.left_out.items()]

    def summary(self) -> list[str]:
        """What happens, in a few lines."""
        chosen, layers = self.model.config.mhla_layers, self.model.config.num_layers
        before, after = self.grids
        where = self.layout.title if self.layout else "Diffusers' layout"
        count = layers if chosen is None else len(chosen)
        lines = [
            f"{type(self.model).__name__} with {'x'.join(map(str, after))} blocks in {count} of {layers} layers, "
            f"from {where}",
            f"{len(self.moves)} weights taken over, {len(self.new)} new"
            + (f": {compressed(self.new)}" if self.new else ""),
        ]
        taken = next((file for file in self.files if file.taken_from), None)
        if taken:
            lines.append(f"weights taken from the entry {taken.taken_from!r} of {taken.path.name}")
        for why in dict.fromkeys(self.left_out.values()):
            keys = [key for key, reason in self.left_out.items() if reason == why]
            lines.append(f"left out: {compressed(keys)} ({why})")
        if self.drift:
            errors = list(self.drift.values())
            lines.append(
                f"mixing interpolated from {before} to {after} blocks; there and back differs by "
                f"{sum(errors) / len(errors):.2e} on average, at most {max(errors):.2e} (relative)"
            )
        return lines


def make_plan(
    files: Sequence[TensorFile],
    stored: Mapping | None,
    *,
    layout: str = "auto",
    given: Mapping | None = None,
    block_grid: Sequence[int] | None = None,
    layers: str | Sequence[int] | None = None,
    gate: bool = False,
    local_conv: int | None = None,
) -> Plan:
    """Work out a conversion.

    Args:
        files: all weight files of the model.
        stored: the config.json beside them, for a model in Diffusers' layout; None for another layout.
        layout: name of that other layout, or "auto".
        given: arguments of the model that the files do not tell, or that shall replace what they tell.
        block_grid: blocks per axis; None: the class's own choice for a stock model, for an MHLA model its own.
        layers: "all" (also None), a share such as "2/3", or indices. An MHLA model keeps the layers that it has.
        gate, local_conv: as in `convert`.

    Raises ValueError (one line) when a key is unexpected, missing or of another shape, when a position table
    is not the one that the model computes, and on an option outside its range.
    """
    shapes = {key: spec[0] for file in files for key, spec in file.specs.items()}
    owner = {key: file for file in files for key in file.specs}
    name, arguments, found, moves, left_out = described(
        owner, shapes, stored, layout, given or {}, block_grid
    )
    family = family_named(name)
    converted_before = name == family.ours.__name__
    given = checked_arguments(given or {}, family.ours, "--config")
    for field_name, option in OPTION_OF.items():
        if field_name in given:
            raise ValueError(f"--config has {field_name!r}: give it with --{option} instead")
    arguments |= given
    before = tuple(arguments.get("mhla_block_grid", ())) if converted_before else ()
    default = family.ours.default_block_grid
    if converted_before:
        refuse_changes(layers, gate, local_conv)
        if block_grid is None and found is None:
            raise ValueError(
                f"the model is an {name} with block_grid {before} already: give another one with --block-grid"
            )
        after = check_block_grid(before if block_grid is None else block_grid, len(default))
        arguments["mhla_block_grid"] = after
    else:
        check_values({"gate": gate})
        after = check_block_grid(default if block_grid is None else block_grid, len(default))
        arguments |= {
            **family.numerics,
            "mhla_block_grid": after,
            "mhla_layers": chosen_layers(layers, given.get("num_layers", layer_number(arguments, family))),
            "mhla_gate": gate,
            "mhla_local_conv": local_conv,
            **given,
        }
    model = without_values(family.ours, arguments)
    # The plain `to`: the models' own warns about the mixing matrices, which stay float32 by themselves.
    nn.Module.to(model, narrowest([spec[1] for file in files for spec in file.specs.values()]))
    after = tuple(after)
    if before and before != after:
        moves = [
            interpolated(move, before, after) if move.target.endswith(MIXING) else move for move in moves
        ]
    plan = Plan(model, family, found, files, {}, [], left_out, (before, after))
    plan.moves = checked_moves(moves, owner, model, shapes)
    plan.new = new_weights(model, plan.moves, may_be_new=not converted_before)
    if found is not None and found.positions in shapes:
        check_positions(model, owner[found.positions].read(found.positions), found.positions)
    if before and before != after:
        for key, (file, move) in plan.moves.items():
            if key.endswith(MIXING):
                plan.drift[key] = round_trip_error(
                    move.take(file.read(move.source)).double(), file, move, plan.grids
                )
    return plan


def described(
    owner: Mapping[str, TensorFile],
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping | None,
    layout: str,
    given: Mapping,
    block_grid: Sequence[int] | None,
) -> tuple[str, dict, Layout | None, list[Move], dict[str, str]]:
    """Class name and arguments of the model in the files, its layout if it is not Diffusers', the moves of its keys,
    and the keys that are left out with the reason."""
    if stored is not None:
        if layout not in ("auto", "diffusers"):
            raise ValueError(f"the folder is in Diffusers' layout, not in {layout!r}: leave --from out")
        name, arguments = class_and_arguments(stored)
        left_out = dict.fromkeys(
            ignored(shapes, family_named(name)), "the stock model has no use for it, either"
        )
        return name, arguments, None, [Move(key, key) for key in shapes if key not in left_out], left_out
    found = find_layout(shapes, layout)
    moves, left_out, unexpected = expand(found, shapes)
    if unexpected:
        raise ValueError(unexpected_message("the checkpoint", unexpected, found))
    known = checked_arguments(given, family_named(found.model).ours, "--config")
    if block_grid is not None:  # a file may hold a number of blocks that does not tell their grid
        known["mhla_block_grid"] = tuple(block_grid)
    arguments = found.read_config(shapes, lambda key: owner[key].read(key), known)
    return found.model, arguments, found, moves, left_out


def ignored(keys: Iterable[str], family: Family) -> list[str]:
    """The keys that published checkpoints hold and the stock class itself drops (`norm_added_q` of Wan 2.1's I2V)."""
    patterns = family.stock._keys_to_ignore_on_load_unexpected or ()
    return [key for key in keys if any(re.search(pattern, key) for pattern in patterns)]


def refuse_changes(layers, gate: bool, local_conv: int | None) -> None:
    for name, value in (("layers", layers), ("gate", gate or None), ("local-conv", local_conv)):
        if value is not None:
            raise ValueError(
                f"an MHLA model keeps the layers and options that it has: leave --{name} out (--block-grid can change)"
            )


def narrowest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The type of new weights: a half-precision model keeps some weights in float32."""
    return next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in dtypes), torch.float32)


def finite(tensor: torch.Tensor, file: TensorFile, key: str) -> torch.Tensor:
    """The same tensor. Raises ValueError when it holds an infinite value or NaN."""
    if not is_finite(tensor):
        raise ValueError(
            f"{file.path} holds infinite values or NaN in {key}: copy or download it again, or take a checkpoint from "
            "before they arose"
        )
    return tensor


def interpolated(move: Move, before: tuple[int, ...], after: tuple[int, ...]) -> Move:
    """The move with the mixing matrix carried over to another block grid, in float64."""
    own = move.change

    def forward(tensor: torch.Tensor) -> torch.Tensor:
        matrix = tensor if own is None else own.forward(tensor)
        return interpolate_mixing(matrix.double(), before, after).float()

    name = f"interpolated from {before} to {after} blocks"
    return Move(move.target, move.source, move.part, move.parts, Change(name, forward))


def round_trip_error(matrix: torch.Tensor, file: TensorFile, move: Move, grids) -> float:
    """How much of a matrix is lost on the way to the other grid and back, relative to its norm."""
    original = file.read(move.source).double().flatten()
    back = interpolate_mixing(matrix, grids[1], grids[0]).flatten()
    return ((back - original).norm() / original.norm().clamp_min(1e-30)).item()


def checked_moves(
    moves: Sequence[Move], owner: Mapping[str, TensorFile], model: MHLAModelMixin, shapes: Mapping
) -> dict[str, tuple[TensorFile, Move]]:
    """The moves by our key. Raises ValueError when the model has no place for one, or one of another shape."""
    expected = model.state_dict()
    unexpected = [move.source for move in moves if move.target not in expected]
    if unexpected:
        raise ValueError(
            f"the checkpoint holds {len(unexpected)} weights that this {type(model).__name__} has no place for: "
            f"{compressed(dict.fromkeys(unexpected))}; it does not belong to its config"
        )
    result: dict[str, tuple[TensorFile, Move]] = {}
    for move in moves:
        if move.target in result:
            raise ValueError(f"{move.source} and {result[move.target][1].source} both become {move.target}")
        dtype = owner[move.source].specs[move.source][1]
        if not dtype.is_floating_point:
            raise ValueError(f"{move.source} is of type {dtype}: give weights that are not quantised")
        # Interpolation changes the shape of what is read; everything else can be tried without values.
        if move.target.endswith(MIXING):
            got = tuple(move.take(owner[move.source].read(move.source)).shape)
        else:
            got = tuple(move.take(torch.empty(shapes[move.source], device="meta")).shape)
        if got != tuple(expected[move.target].shape):
            raise ValueError(
                f"{move.source} gives {move.target} the shape {got}, but this {type(model).__name__} has "
                f"{tuple(expected[move.target].shape)}: the checkpoint does not belong to its config"
            )
        result[move.target] = (owner[move.source], move)
    return result


def new_weights(model: MHLAModelMixin, moves: Mapping, may_be_new: bool) -> list[str]:
    """Keys that the checkpoint lacks and MHLA adds. Raises ValueError when it lacks any other."""
    absent = [key for key in model.state_dict() if key not in moves]
    ours = {
        f"{prefix}.{name}.{weight}"
        for prefix, attention in model.named_modules()
        if hasattr(attention, "new_modules")
        for name, module in attention.new_modules()
        for weight, _ in module.named_parameters()
    }
    missing = [key for key in absent if not may_be_new or key not in ours]
    if missing:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} weights of this {type(model).__name__}: {compressed(missing)}; "
            "nothing is made up in their place, so give a complete checkpoint"
        )
    return absent


def check_positions(model: MHLAModelMixin, table: torch.Tensor, key: str) -> None:
    """Raise ValueError unless a stored position table is the one that the model computes by itself."""
    computed = next((buffer for name, buffer in model.named_buffers() if name.endswith("pos_embed")), None)
    if computed is None:
        computed = torch.zeros(1, 1, 1)
    elif computed.shape != table.shape:
        raise ValueError(f"{key} of shape {tuple(table.shape)} is not the model's, {tuple(computed.shape)}")
    difference = (table.float() - computed).abs().max().item()
    allowed = 1e-3 if table.dtype == torch.float32 else 2e-2
    if not difference <= allowed:
        raise ValueError(
            f"{key} differs from the positions that the model computes (by up to {difference:.3g}): it was trained or "
            "is of another kind, and would be lost"
        )
