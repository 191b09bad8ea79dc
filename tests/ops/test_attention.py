"""The front of the operator: what it accepts, what it refuses and what it says."""

import pytest
import torch

from mhla_diffusion.blocks import block_table
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import GridRope, mhla_attention


def zeros(tokens=16, heads=2, dim=8, batch=1, dtype=torch.float32):
    return torch.zeros(batch, tokens, heads, dim, dtype=dtype)


def angles(tokens=16, pairs=4):
    return torch.ones(tokens, pairs), torch.zeros(tokens, pairs)


GRID = {"grid": (4, 4), "block_grid": (2, 2)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(16, 2, 8)}, r"q has shape \(16, 2, 8\): give \(batch, tokens, heads, head dim\)"),
        ({"k": zeros(dtype=torch.bfloat16)}, r"k.to\(q\)"),
        ({"q": zeros().long(), "k": zeros().long(), "v": zeros().long()}, "give float32, bfloat16"),
        ({"k": zeros(dim=4)}, "batch, heads and head dim must be the same"),
        ({"v": zeros(tokens=8)}, "only the last axis may differ"),
        ({"q": zeros(heads=0), "k": zeros(heads=0), "v": zeros(heads=0)}, "only the batch may be empty"),
        ({"mixing": torch.eye(3)}, r"give a float \(4, 4\) or \(2, 4, 4\)"),
        ({"mixing": torch.eye(4).long()}, r"give a float \(4, 4\)"),
        ({"mixing": torch.ones(3, 4, 4)}, "give one matrix or 2"),
        ({"grid": (4, 5)}, "grid \\(4, 5\\) holds 20 tokens but q has 16"),
        ({"block_grid": (2,)}, "one block count for each of the 2 axes"),
        ({"block_grid": (0, 2)}, "one positive integer"),
        ({"grid": None}, r"pass block_table=block_table\(grid, block_grid\)"),
        ({"block_table": block_table((4, 4), (2, 2))}, "pass one of them"),
        ({"grid": None, "block_grid": None, "block_table": torch.zeros(4, 4)}, "give an int64"),
        ({"grid": None, "block_grid": None, "block_table": torch.zeros(4, 4).long()}, "exactly once"),
        (
            {"grid": None, "block_grid": None, "block_table": torch.zeros(2, 4).long()},
            "has room for 8 tokens",
        ),
        ({"k": zeros(tokens=9), "v": zeros(tokens=9)}, "pass key_block_table"),
        ({"feature_map": "elu"}, "choose one of relu"),
        ({"normalizer": "sum"}, "choose one of paper, none, official"),
        ({"feature_eps": -1.0}, "both must be finite and >= 0"),
        ({"feature_eps": float("nan")}, "both must be finite and >= 0"),
        ({"feature_eps": 0.0}, "pass denominator_eps=1e-15"),
        ({"backend": "cuda"}, "choose one of auto, triton, eager, reference"),
        ({"rope": angles(pairs=8)}, r"give \(cos, sin\), each \(16, 4\)"),
        ({"q": zeros(dim=5), "k": zeros(dim=5), "rope": angles()}, "the head dim 5 is odd"),
        ({"key_rope": angles()}, "pass rope="),
        (
            {"rope": (*angles(), torch.ones(16, 4))},
            r"rope is no pair of tensors: give \(cos, sin\), each \(16, 4\)",
        ),
        ({"rope": (None, None)}, "rope is no pair of tensors"),
        (
            {"query_norm": torch.ones(8)},
            r"query_norm is no pair of a weight and a number: give \(weight, eps\)",
        ),
        ({"key_norm": (torch.ones(8), None)}, "key_norm is no pair of a weight and a number"),
        ({"norm_weight": torch.ones(4)}, r"give one weight per channel, \(8,\)"),
        ({"gate": zeros(dim=4)}, r"give the output's shape \(1, 16, 2, 8\)"),
        ({"local": zeros(heads=1)}, r"give the output's shape \(1, 16, 2, 8\)"),
        ({"gate": zeros().to("meta")}, r"gate is on meta but q is on cpu: move it with .to\(q.device\)"),
        ({"query_norm": (torch.ones(8, device="meta"), 1e-6)}, "query_norm is on meta but q is on cpu"),
        ({"grid": (3, 6), "block_grid": (2, 2), "q": zeros(18), "k": zeros(18), "v": zeros(18)}, None),
    ],
)
def test_wrong_input_is_refused_in_one_line(changes, message):
    arguments = {"q": zeros(), "k": zeros(), "v": zeros(), "mixing": torch.eye(4), **GRID, **changes}
    if message is None:  # the same call with a fitting grid passes
        mhla_attention(**arguments)
        return
    with pytest.raises(ValueError, match=message) as error:
        mhla_attention(**arguments)
    assert "\n" not in str(error.value)


def test_the_released_denominator_needs_equal_blocks():
    q = zeros(15)
    with pytest.raises(ValueError, match="use normalizer='paper'"):
        mhla_attention(q, q, q, torch.eye(4), grid=(3, 5), block_grid=(2, 2), normalizer="official")
    q, k = zeros(16), zeros(8)
    table = block_table((8,), (2,))
    with pytest.raises(ValueError, match="as many query as key blocks, here 4 and 2"):
        mhla_attention(q, k, k, torch.ones(4, 2), **GRID, key_block_table=table, normalizer="official")


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="normaliser"):
        mhla_attention(zeros(), zeros(), zeros(), torch.eye(4), **GRID, normaliser="none")


def test_an_axis_with_fewer_tokens_than_blocks_wants_its_own_matrix():
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="interpolate_mixing"):
        mhla_attention(q, q, q, initial_mixing((3, 2)), grid=(1, 4), block_grid=(3, 2))
    assert mhla_attention(q, q, q, initial_mixing((1, 2)), grid=(1, 4), block_grid=(3, 2)).shape == q.shape


def test_a_table_is_checked_again_after_it_changed():
    q = torch.randn(1, 4, 1, 8)
    table = torch.tensor([[0, 1], [2, 3]])
    mhla_attention(q, q, q, torch.eye(2), table)
    table[0, 0] = 3
    with pytest.raises(ValueError, match="exactly once"):
        mhla_attention(q, q, q, torch.eye(2), table)
    with torch.inference_mode():
        fresh = torch.tensor([[0, 1], [2, 3]])
        mhla_attention(q, q, q, torch.eye(2), fresh)
        fresh[0, 0] = 3
        with pytest.raises(ValueError, match="exactly once"):
            mhla_attention(q, q, q, torch.eye(2), fresh)


def test_int32_tables_and_half_precision_mixing_are_accepted():
    q = torch.randn(1, 15, 2, 8)
    table, mixing = block_table((3, 5), (2, 2)), initial_mixing((2, 2))
    expected = mhla_attention(q, q, q, mixing, table)
    assert torch.equal(mhla_attention(q, q, q, mixing, table.int()), expected)
    truth, again = (mhla_attention(q, q, q, mixing, x, backend="reference") for x in (table, table.int()))
    assert torch.equal(truth, again)
    half = mhla_attention(q, q, q, mixing.bfloat16(), table)
    assert torch.equal(half, mhla_attention(q, q, q, mixing.bfloat16().float(), table))


def test_the_released_denominator_takes_other_blocks_queries():
    # With v = 1 the paper's output is 1; the released code's is not, unless the mixing is diagonal.
    q, k = torch.rand(2, 1, 16, 1, 8, generator=torch.Generator().manual_seed(0))
    v = torch.ones_like(q)
    mixing = initial_mixing((2, 2))
    paper = mhla_attention(q, k, v, mixing, **GRID)
    official = mhla_attention(q, k, v, mixing, **GRID, normalizer="official")
    assert (paper - 1).abs().max() < 1e-5 < 1e-2 < (official - 1).abs().max()
    diagonal = mhla_attention(q, k, v, torch.eye(4), **GRID, normalizer="official")
    assert (diagonal - 1).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_an_empty_batch_gives_an_empty_output(device, backend):
    q = zeros(batch=0).to(device).requires_grad_()
    mixing = torch.eye(4, device=device, requires_grad=True)
    out = mhla_attention(q, q, q, mixing, **GRID, backend=backend)
    assert out.shape == q.shape
    gradients = torch.autograd.grad(out.sum(), (q, mixing))
    assert gradients[0].shape == q.shape and (gradients[1] == 0).all()


@pytest.mark.parametrize("backend", ["triton", "eager", "reference"])
@pytest.mark.parametrize(
    "mapped", ["q", "v", "mixing", "norm_weight", "gate", "local", "query_norm", "rope", "frequencies"]
)
def test_vmap_is_refused_in_one_line(device, mapped, backend):
    options = {"normalizer": "none", "backend": backend, **GRID}
    tensors = dict.fromkeys(("q", "k", "v", "gate", "local"), zeros().to(device) + 1)
    tensors |= {"mixing": torch.eye(4, device=device), "norm_weight": torch.ones(8, device=device)}
    wrapped = {
        "query_norm": (torch.ones(8, device=device), lambda x: {"query_norm": (x, 1e-6)}),
        "rope": (torch.ones(16, 4, device=device), lambda x: {"rope": (x, x)}),
        "frequencies": (torch.ones(2, 4, device=device), lambda x: {"rope": GridRope(x)}),
    }
    x, changes = wrapped.get(mapped, (tensors.get(mapped), lambda x: {mapped: x}))

    def call(x):
        return mhla_attention(**{**tensors, **changes(x)}, **options)

    calls = [call] if backend == "triton" else [call, torch.func.grad(lambda x: call(x).sum())]
    for each in calls:
        with pytest.raises(ValueError, match="inside torch.func.vmap: put the mapped axis") as error:
            torch.func.vmap(each)(torch.stack([x, x]))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["states", "dual"])
def test_gradients_of_torch_func_are_refused_by_the_kernels_in_one_line(device, form):
    q = zeros().to(device) + 1

    def call(x, backend="triton"):
        return mhla_attention(q, q, x, torch.eye(4, device=device), **GRID, backend=backend, form=form).sum()

    with pytest.raises(ValueError, match=r"take torch.autograd.grad, or pass backend='eager'") as error:
        torch.func.grad(call)(q)
    assert "\n" not in str(error.value)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(call(leaf), leaf)
    assert torch.allclose(torch.func.grad(lambda x: call(x, "eager"))(q), expected, atol=1e-5)


@pytest.mark.parametrize("form", ["states", "dual"])
def test_second_gradients_are_refused_by_the_kernels_in_one_line(device, form):
    q, k = torch.randn(2, 1, 16, 2, 8, generator=torch.Generator().manual_seed(0)).to(device)
    q.requires_grad_()

    def second(backend):
        out = mhla_attention(q, k, k, torch.eye(4, device=device), **GRID, backend=backend, form=form)
        (first,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    with pytest.raises(ValueError, match="no second gradients .* pass backend='eager'") as error:
        second("triton")
    assert "\n" not in str(error.value)
    assert torch.allclose(second("eager"), second("reference"), rtol=1e-4, atol=1e-5)


def test_a_gradient_of_the_rotation_is_refused_by_the_kernels_in_one_line(device):
    q = (zeros() + 1).to(device)
    cos, sin = (torch.ones(16, q.shape[-1] // 2, device=device) for _ in range(2))
    cos.requires_grad_()

    def call(backend):
        return mhla_attention(
            q, q, q, torch.eye(4, device=device), **GRID, rope=(cos, sin), normalizer="none", backend=backend
        )

    with pytest.raises(ValueError, match=r"rope requires a gradient.*pass it with \.detach\(\)") as error:
        call("triton")
    assert "\n" not in str(error.value)
    call("eager").sum().backward()
    assert cos.grad.abs().sum() > 0
    with torch.no_grad():
        assert call("triton").shape == q.shape


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own first look for jvp rules
@pytest.mark.parametrize("form", ["states", "dual"])
@pytest.mark.parametrize("moved", ["q", "mixing", "gate", "cos"])
def test_forward_mode_gradients_are_refused_by_the_kernels_in_one_line(device, moved, form):
    tensors = {"q": zeros() + 1, "k": zeros() + 1, "v": zeros() + 1, "mixing": torch.eye(4), "gate": zeros()}
    tensors = {name: x.to(device) for name, x in tensors.items()}

    tensors["cos"] = torch.ones(16, 4, device=device)
    sin = torch.zeros(16, 4, device=device)

    def call(x, backend="triton"):
        given = {**tensors, moved: x}
        rope = {"rope": (given.pop("cos"), sin), "normalizer": "none"} if moved == "cos" else {}
        given.pop("cos", None)
        return mhla_attention(**given, **rope, **GRID, backend=backend, form=form)

    primal, tangent = tensors[moved], torch.ones_like(tensors[moved])
    with pytest.raises(ValueError, match="no forward-mode gradients .* pass backend='eager'") as error:
        torch.func.jvp(call, (primal,), (tangent,))
    assert "\n" not in str(error.value)
    (_, got), (_, want) = (
        torch.func.jvp(lambda x, name=name: call(x, name), (primal,), (tangent,))
        for name in ("eager", "reference")
    )
    assert torch.allclose(got, want, atol=1e-5)
    with torch.autograd.forward_ad.dual_level():  # without a tangent there is nothing to lose
        assert call(primal).shape == tensors["q"].shape
