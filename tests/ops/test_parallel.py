"""A grid's tokens over several processes: here all in one, which sums the states that each hands in."""

import math

import pytest
import torch

from mhla_diffusion.ops import GridRope, mhla_attention
from mhla_diffusion.ops.parallel import parallel_mhla_attention
from mhla_diffusion.ops.share import Share

GRID, BLOCKS, TOKENS = (3, 3, 4), (2, 2, 2), 36


def inputs(device, *, heads=2, dim=8, value_dim=8, per_head=False, seed=0) -> dict:
    draw = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=draw).to(device).requires_grad_()

    blocks = math.prod(BLOCKS)
    shape = (1, TOKENS, heads, dim)
    return {
        "q": random(*shape),
        "k": random(*shape),
        "v": random(*shape[:3], value_dim),
        "mixing": torch.rand(*((heads,) if per_head else ()), blocks, blocks, generator=draw)
        .to(device)
        .requires_grad_(),
    }


def extras_of(device, *, heads=2, dim=8, value_dim=8) -> dict:
    draw = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=draw).to(device).requires_grad_()

    return {
        "query_weight": random(heads, dim),
        "key_weight": random(heads, dim),
        "norm_weight": random(value_dim),
        "gate": random(1, TOKENS, heads, value_dim),
        "local": random(1, TOKENS, heads, value_dim),
    }


def cut(tensors: dict, start: int, stop: int) -> dict:
    return {
        name: x[:, start:stop] if x.ndim == 4 and x.shape[1] == TOKENS else x for name, x in tensors.items()
    }


def options_of(extras: dict, device, normalizer: str, dim: int = 8) -> dict:
    frequencies = torch.rand(3, dim // 2, generator=torch.Generator().manual_seed(2)).to(device)
    options = {"normalizer": normalizer, "rope": GridRope(frequencies), "grid": GRID, "block_grid": BLOCKS}
    if extras:
        options |= {name: extras[name] for name in ("norm_weight", "gate", "local")}
        options |= {f"{name}_norm": (extras[f"{name}_weight"], 1e-6) for name in ("query", "key")}
        options["gate_bias"] = 0.5
    return options


@pytest.mark.gpu
@pytest.mark.parametrize("normalizer", ["paper", "none"])
@pytest.mark.parametrize("dim", [128, 112])
def test_bfloat16_over_three_processes(device, normalizer, dim):
    tensors = inputs(device, dim=dim, value_dim=dim)
    tensors = {name: x.detach() if name == "mixing" else x.detach().bfloat16() for name, x in tensors.items()}
    exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
    tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    options = options_of({}, device, normalizer, dim)
    truth = mhla_attention(**exact, backend="reference", **options)
    weights = torch.randn(truth.shape, device=device)
    out = over_ranks(tensors, {}, 3, "triton", normalizer)
    assert (out - truth).norm() <= 1e-2 * truth.norm()
    for name, got, wanted in zip(
        tensors,
        torch.autograd.grad(out, list(tensors.values()), weights.bfloat16()),
        torch.autograd.grad(truth, list(exact.values()), weights.double()),
        strict=True,
    ):
        assert (got - wanted).norm() <= 2e-2 * wanted.norm(), name


def over_ranks(tensors: dict, extras: dict, ranks: int, backend: str, normalizer: str) -> torch.Tensor:
    """All processes' outputs together. A first pass collects the states, whose sum a second one is given."""
    device = tensors["q"].device
    spans, states = Share(0, ranks).spans(TOKENS), []

    def passed(reduce) -> torch.Tensor:
        outs = []
        for start, stop in spans:
            options = options_of(cut(extras, start, stop), device, normalizer, tensors["q"].shape[-1])
            own = cut(tensors, start, stop)
            outs.append(
                parallel_mhla_attention(**own, start=start, reduce=reduce, backend=backend, **options)
            )
        return torch.cat(outs, dim=1)

    def keep(state):
        states.append(state)
        return state

    passed(keep)
    total = sum(states)
    return passed(lambda state: total)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize(
    ("normalizer", "ranks", "fused", "per_head"),
    [
        ("none", 1, False, True),
        ("none", 2, True, False),
        ("paper", 2, False, False),
        ("paper", 5, True, True),
    ],
)
def test_any_split_computes_what_one_process_does(device, backend, normalizer, ranks, fused, per_head):
    tensors = inputs(device, per_head=per_head)
    extras = extras_of(device) if fused else {}
    truth = mhla_attention(**tensors, backend="eager", **options_of(extras, device, normalizer))
    every = [*tensors.values(), *extras.values()]
    weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(3)).to(device)
    expected = torch.autograd.grad(truth, every, weights)

    out = over_ranks(tensors, extras, ranks, backend, normalizer)
    assert (out - truth).norm() <= 1e-5 * truth.norm()
    # The whole graph is in one process: what each adds to a shared weight's gradient is summed by autograd.
    for name, got, wanted in zip(
        [*tensors, *extras], torch.autograd.grad(out, every, weights), expected, strict=True
    ):
        assert (got - wanted).norm() <= 2e-5 * wanted.norm(), name
    with torch.no_grad():  # the steps around the operator are fused here
        out = over_ranks(tensors, extras, ranks, backend, normalizer)
    assert (out - truth).norm() <= 1e-5 * truth.norm()


def test_what_cannot_be_spread_is_refused():
    tensors = {name: x.detach() for name, x in inputs("cpu").items()}
    options = {"grid": GRID, "block_grid": BLOCKS, "reduce": lambda state: state}
    for changes, wrong in (
        ({"start": 1}, "tokens 1..36 of a grid"),
        ({"start": 0, "normalizer": "official"}, "choose 'paper' or 'none'"),
        ({"start": 0, "backend": "reference"}, "needs all tokens in one process"),
        ({"start": 0, "mixing": torch.rand(7, 7)}, "this grid has 8 blocks"),
    ):
        with pytest.raises(ValueError, match=wrong):
            parallel_mhla_attention(**{**tensors, **options, **changes})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own first look for jvp rules
def test_forward_mode_gradients_are_refused_by_the_kernels(device):
    q, k, v = torch.ones(3, 1, 4, 1, 8, device=device)
    mixing = torch.eye(2, device=device)

    def call(x):
        return parallel_mhla_attention(
            x, k, v, mixing, grid=(4,), block_grid=(2,), start=0, reduce=lambda y: y, backend="triton"
        )

    with pytest.raises(ValueError, match="no forward-mode gradients .* take reverse mode"):
        torch.func.jvp(call, (q,), (k,))


def test_shares_are_runs_without_gaps_that_differ_by_one_token():
    for tokens, ranks in ((36, 1), (36, 5), (7, 7), (100, 3)):
        spans = Share(0, ranks).spans(tokens)
        assert spans[0][0] == 0 and spans[-1][1] == tokens
        assert all(before[1] == after[0] for before, after in zip(spans, spans[1:], strict=False))
        sizes = [stop - start for start, stop in spans]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        pieces = torch.arange(tokens).tensor_split(ranks)  # how Diffusers splits
        assert [(int(x[0]), int(x[-1]) + 1) for x in pieces] == spans
        assert spans == [Share(rank, ranks).span(tokens) for rank in range(ranks)]


def test_a_share_of_any_number_of_tokens_in_one_graph():
    """As compiled layers want it from the second size of videos on, when sizes become symbols."""

    def taken(x):
        start, stop = Share(1, 3).span(x.shape[0])
        return x[start:stop] + 1

    compiled = torch.compile(taken, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (36, 37, 50):
        x = torch.arange(tokens)
        assert torch.equal(compiled(x), taken(x))


def compiled_states(q, k, v, mixing):
    options = {"grid": GRID, "block_grid": BLOCKS, "normalizer": "paper", "start": 5, "backend": "triton"}
    return parallel_mhla_attention(q, k, v, mixing, reduce=lambda state: 2 * state, **options)


def test_one_graph_with_the_sum_between_two_operators(device):
    torch.compiler.reset()
    tensors = inputs(device)
    run = [x[:, 5:17] if x.ndim == 4 else x for x in tensors.values()]
    compiled = torch.compile(compiled_states, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*run), compiled_states(*run)
    assert (out - expected).norm() <= 1e-6 * expected.norm()
    for got, wanted in zip(
        *(torch.autograd.grad(x.square().sum(), list(tensors.values())) for x in (out, expected)), strict=True
    ):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
