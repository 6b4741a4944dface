# SPDX-License-Identifier: Apache-2.0
"""Products made for a few tokens, and the router's choice: kernels and plain PyTorch agree.

Where there is a card the kernels run on it, elsewhere in Triton's interpreter.
"""

import importlib
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_metis.model import few_tokens, moe, router, switches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts off what does not fit into BF16, where a card rounds.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
# One is met by rows, up to 16 and up to 32 are padded to tiles, full and not.
TOKENS = [1, 3, 16, 19]
E, K, R = 12, 4, 24


def draw(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def assert_same(found: Tensor, wanted: Tensor, limit: float | None = None) -> None:
    """Equal but for the order of sums, after which a BF16 value may be its neighbour."""
    assert found.dtype == wanted.dtype
    limit = limit or (4e-6 if found.dtype == torch.float32 else 2**-7)
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit * float(wanted.abs().max()))


def kernel_module(name: str) -> ModuleType:
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("set TRITON_INTERPRET=1, as nox does: without a card nothing else runs it")
    return importlib.import_module(f"vllm_metis.model.{name}")


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return kernel_module("few_tokens_kernel")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
# On a card that is filled by so few rows, and on others; columns that fill blocks, or not even quarters.
@pytest.mark.parametrize(
    ("processors", "rows", "width"), [(1, 41, 160), (64, 24, 512), (64, 21, 90)]
)
def test_a_product_is_what_the_library_says(
    kernel, monkeypatch, dtype, tokens, processors, rows, width
):
    monkeypatch.setattr(kernel, "card", lambda: kernel.Card(processors, 101376))
    x, weight = draw(tokens, width, dtype=dtype), draw(rows, width, seed=1, dtype=dtype)
    assert_same(kernel.product(x, weight), few_tokens.product(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [96, 50])
def test_the_routers_features_are_made_beside_a_product(kernel, dtype, tokens, width):
    x, weight = draw(tokens, width, dtype=dtype), draw(16, width, seed=1, dtype=dtype)
    scale = (2 * width + R) ** -0.5
    route_weight = draw(R, 3 * width + R, seed=2, dtype=dtype, scale=scale)
    inputs = few_tokens.FeatureInputs(
        draw(tokens, width, seed=3, dtype=dtype),
        draw(tokens, width, seed=4, dtype=dtype),
        draw(tokens, R, seed=5),
        route_weight,
        draw(R, seed=6, dtype=dtype),
    )
    beside = kernel.Beside(inputs[:3], inputs.weight, inputs.bias, tanh=True)
    y, found = kernel.products(x, weight, beside)
    assert_same(y, few_tokens.product(x, weight))
    assert_same(found, few_tokens.features(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_an_fp32_weight_beside_a_product_loses_nothing(kernel, dtype, tokens):
    """Held against float64: what FP32 is off there is a thousandth of what BF16 is."""
    x, weight = draw(tokens, 160, dtype=dtype), draw(16, 160, seed=1, dtype=dtype)
    told, rows, bias = (
        draw(tokens, R, seed=2, dtype=dtype),
        draw(E, 160 + R, seed=3),
        draw(E, seed=4),
    )
    _, found = kernel.products(x, weight, kernel.Beside([x, told], rows, bias))
    exact = F.linear(torch.cat([x, told], dim=-1).double(), rows.double(), bias.double())
    assert found.dtype == torch.float32
    assert (found.double() - exact).abs().max() < 1e-6 * exact.abs().max()


def expert_weights(dtype: torch.dtype, inner: int, shared: int) -> list[Tensor | None]:
    width = 20
    gate_up = draw(E, 2 * inner, width, seed=1, dtype=dtype, scale=width**-0.5)
    down = draw(E, width, inner, seed=2, dtype=dtype, scale=inner**-0.5)
    if not shared:
        return [gate_up, down, None, None]
    shared_gate_up = draw(2 * shared, width, seed=3, dtype=dtype, scale=width**-0.5)
    return [gate_up, down, shared_gate_up, draw(width, shared, seed=4, dtype=dtype, scale=0.2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
# As many rows for the shared expert as for a routed one, more, and no shared expert.
@pytest.mark.parametrize(("inner", "shared"), [(8, 8), (7, 14), (8, 0)])
def test_experts_are_what_the_formula_says(kernel, dtype, tokens, inner, shared):
    latent = draw(tokens, 20, dtype=dtype)
    _, routing = told(tokens)
    weights = expert_weights(dtype, inner, shared)
    assert_same(
        kernel.experts(latent, routing, *weights), few_tokens.experts(latent, routing, *weights)
    )


def told(tokens: int) -> tuple[tuple[Any, ...], Tensor]:
    """Return the arguments of a choice, and the choice."""
    arguments = draw(tokens, E), draw(E, seed=1), draw(E, R, seed=2), draw(tokens, R, seed=3), K
    return arguments, router.chosen(*arguments)[0]


@pytest.mark.parametrize("embedded", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_kernel_and_plain_form_choose_the_same(embedded, tokens):
    (logits, bias, embeddings, history, k), _ = told(tokens)
    arguments = logits, bias, embeddings.to(embedded), history, k
    kernel = kernel_module("router_kernel")
    for found, wanted in zip(kernel.choose(*arguments), router.chosen(*arguments), strict=True):
        assert_same(found, wanted)


def test_a_choice_of_logits_that_are_no_numbers_is_of_experts_that_exist():
    """A number that is none must not become an address."""
    (logits, *rest), _ = told(2)
    routing = kernel_module("router_kernel").choose(torch.full_like(logits, float("nan")), *rest)[0]
    experts = routing[:, K:]
    assert ((experts >= 0) & (experts < E)).all()


def test_one_batch_gives_the_same_bits_each_time(kernel):
    x, weight = draw(16, 512), draw(24, 512, seed=1)
    latent, (_, routing) = draw(3, 20), told(3)
    weights = expert_weights(torch.float32, 8, 8)
    for run in (
        lambda: kernel.product(x, weight),
        lambda: kernel.experts(latent, routing, *weights),
    ):
        assert torch.equal(run(), run())


def test_a_row_has_the_same_bits_whatever_stands_beside_it(kernel):
    x, weight = draw(16, 512), draw(24, 512, seed=1)
    among, fewer = kernel.product(x, weight), kernel.product(x[5:9], weight)
    assert torch.equal(among[5:9], fewer)


def test_few_tokens_are_routed_and_answered_as_many_are(kernel, monkeypatch):
    """The whole sublayer by the kernels, its router's weight folded, against the formula."""
    tokens, width, latent_width = 3, 96, 20
    gate_up, down, shared_gate_up, shared_down = expert_weights(torch.float32, 8, 8)

    def holder(weight: Tensor | None, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(weight=weight, **more)

    layer: Any = SimpleNamespace(
        has_few=True,
        latent_down=holder(draw(latent_width, width, seed=5, scale=width**-0.5)),
        latent_up=holder(draw(width, latent_width, seed=6, scale=latent_width**-0.5)),
        expert_router=holder(draw(E, latent_width + R, seed=7), bias=draw(E, seed=8)),
        router_rows=torch.empty(E, width + R, device=DEVICE),
        selection_bias=draw(E, seed=9),
        expert_embeddings=draw(E, R, seed=10),
        top_k=K,
        shared_expert=SimpleNamespace(
            gate_up_proj=holder(shared_gate_up), down_proj=holder(shared_down)
        ),
        experts=SimpleNamespace(
            routed_experts=SimpleNamespace(w13_weight=gate_up, w2_weight=down),
            moe_config=SimpleNamespace(tp_size=1),
        ),
    )
    moe.LatentMoE.finalize(layer)
    x, features, history = draw(tokens, width), draw(tokens, R, seed=11), draw(tokens, R, seed=12)
    monkeypatch.setattr(few_tokens, "FEW_SHARED", 16)
    output, routing = moe.LatentMoE.of_few(layer, x, features, history)

    latent = F.linear(x, layer.latent_down.weight)
    logits = router.route(latent, features, layer.expert_router.weight, layer.expert_router.bias)
    chosen, *told = router.chosen(logits, layer.selection_bias, layer.expert_embeddings, history, K)
    mixed = few_tokens.experts(latent, chosen, gate_up, down, shared_gate_up, shared_down)
    assert_same(output, F.linear(mixed, layer.latent_up.weight), 1e-5)
    for found, wanted in zip(routing, told, strict=True):
        assert_same(found, wanted, 1e-5)


def test_operators_are_what_the_compiler_is_told():
    """Shapes and dtypes without the data, and no argument that is changed or returned."""
    x, weight = draw(3, 96), draw(40, 96, seed=1)
    inputs = draw(3, 96), draw(3, 96), draw(3, R), draw(R, 300), draw(R)
    for name, arguments in (
        ("metis_product", (x, weight)),
        ("metis_product_with_features", (x, weight, *inputs)),
        ("metis_choose", told(3)[0]),
    ):
        operator = getattr(torch.ops.vllm, name).default
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator, arguments, test_utils=checks)


def test_the_switch_takes_a_number_of_tokens_and_names_what_else_it_was_given(monkeypatch):
    for value in (0, 1, switches.MOST_TOKENS):
        monkeypatch.setenv("VLLM_METIS_FEW_TOKENS", str(value))
        assert switches.few_tokens() == (value if DEVICE == "cuda" else 0)
    for value in ("off", "-1", "1.5", str(switches.MOST_TOKENS + 1)):
        monkeypatch.setenv("VLLM_METIS_FEW_TOKENS", value)
        with pytest.raises(ValueError, match=rf"'{value}': expected .* 0 \(never\) to 32"):
            switches.few_tokens()
