# SPDX-License-Identifier: Apache-2.0
"""What each tensor that vLLM holds must be, given the checkpoint, and how a held one differs.

Placement is written down a second time here, apart from the plugin's loader: which stored tensor
stands behind a parameter, in what order its rows and columns lie, and what is computed of it. So a
fault of the loader cannot hide. FP8 is held to its own rounding: what a checkpoint stores as FP8
byte by byte, what is rounded on load to the nearest value under the scale that the weights imply.

Needs torch, not vLLM. Source: docs/model.md, "Checkpoint tensors" and forward pass 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.checkpoints.quantize import FP8, FP8_MAX, KINDS, kind_of
from harness.loaded_weights.stored import StoredWeights
from harness.reference.modeling_metis16 import HyperConnection

CONSTANT_LIMIT = 1e-6
"""Largest error of what is computed of weights alone. A right one is off by 1e-7, a pass taken for
another by 1e-1."""

SCALE = "_scale"
UNKNOWN = "unknown"
_EXPERTS = re.compile(r"(.*\.moe)\.experts\.routed_experts\.(w13|w2)_weight(_scale)?")
_KV_SCALE = re.compile(r".*\.passes\.\d+\._(?:k|v|q|prob)_scale")
_CONSTANT = re.compile(
    r"(?P<connection>.*connection)\.(?P<field>mix|read|write)|(?P<mixer>.*\.mixer)\.gates"
    r"|.*\.depth_memory\.(?P<memory>entry_bias|fold_weight|fold_bias|logit_weight|logit_bias)"
)
_TRAINING_NAMES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.embed_tokens\.", "embedding."),
        (r"^model\.", ""),
        (r"\.mixer\.mamba\.", ".mixer.impl.mixer."),
        (r"\.A$", ".A_log"),
        (r"\.conv_weights$", ".conv1d.weight"),
        (r"\.qkv_proj\.", ".qkv."),
        (r"\.o_proj\.", ".out."),
        (r"\.gate_up_proj\.", ".gate_up."),
        (r"\.down_proj\.", ".down."),
        (r"\.route_(weight|bias)$", r".route_projection.\1"),
    )
]
_MODULES = (
    ("constants", f"^(?:{_CONSTANT.pattern})$"),
    ("KV scales", _KV_SCALE.pattern),
    ("embedding", r"^model\.embed_tokens"),
    ("head", r"^lm_head"),
    ("routed experts", r"\.routed_experts\."),
    ("shared expert", r"\.shared_expert\."),
    ("router", r"\.(?:expert_router|selection_bias|expert_embeddings)"),
    ("latent projections", r"\.latent_(?:down|up)"),
    ("Mamba in_proj", r"\.mamba\.in_proj"),
    ("Mamba out_proj", r"\.mamba\.out_proj"),
    ("Mamba convolution", r"\.mamba\.conv"),
    ("Mamba A, D, dt_bias", r"\.mamba\.(?:A|D|dt_bias)$"),
    ("attention qkv", r"\.mixer\.qkv_proj"),
    ("attention out", r"\.mixer\.o_proj"),
    ("attention per pass", r"\.mixer\.pass_"),
    ("norms", r"norm\.weight$"),
    ("hyper-connections", r"_connection\."),
    ("depth memory", r"\.depth_memory\."),
    ("continuation", r"\.continuation\."),
    ("streams and passes", r"^model\.(?:stream|pass)_embeddings$"),
)


@dataclass(frozen=True)
class TensorComparison:
    """One held tensor against its expectation.

    Attributes:
        differing: values that are not what was expected.
        fault: what is wrong, None where nothing is.
        rounded_on_load: a differing value is one FP8 step off, which a few may be.
    """

    name: str
    kind: str
    nbytes: int
    values: int
    differing: int
    fault: str | None = None
    rounded_on_load: bool = False


class Expectation:
    """Expects of vLLM what a checkpoint holds.

    Args:
        dtype: the model dtype.
        quantizing: whether rounding to FP8 on load was asked for.
    """

    def __init__(self, stored: StoredWeights, dtype: torch.dtype, quantizing: bool = False):
        self._stored = stored
        self._dtype = dtype
        self._quantizing = quantizing
        self._passes = stored.config.num_passes

    def compare(self, name: str, held: Tensor) -> TensorComparison:
        """Hold one of vLLM's tensors against the checkpoint."""
        if held.dim() == 2 and not held.is_contiguous():
            held = held.t()  # FP8 kernels take weights column-major: a view of what was loaded
        try:
            wanted = self._wanted(name, held)
        except KeyError as error:
            return _fails(name, held, f"the checkpoint has no {error.args[0]}")
        if held.shape != wanted.shape:
            shapes = f"shape {list(held.shape)}, expected {list(wanted.shape)}"
            return _fails(name, held, f"{shapes}; vLLM packs weights for some kernels")
        if module_kind(name) == "constants":
            right = (held - wanted).abs() <= CONSTANT_LIMIT  # False for NaN
            return _counted(name, held, ~right, f"are off by more than {CONSTANT_LIMIT:g}")
        is_scale = name.endswith(SCALE)
        rounds = self._quantizing and not is_scale and _fp8_of(name)
        if held.dtype == FP8 and wanted.dtype != FP8:
            if not rounds:
                return _fails(name, held, f"FP8, where the checkpoint holds {wanted.dtype}")
            return self._compare_rounded(name, held, wanted.to(self._dtype))
        if rounds or (wanted.dtype == FP8 and held.dtype != FP8):
            return _fails(name, held, f"{held.dtype}, expected FP8")
        return _counted(name, held, _bits(held) != _bits(wanted.to(held.dtype)), "differ")

    def _wanted(self, name: str, held: Tensor) -> Tensor:
        """Return what `held` must be, on its device; unquantized tensors in the stored dtype.

        Raises:
            KeyError: with the training runtime's name of what the checkpoint lacks.
        """
        if _KV_SCALE.fullmatch(name):
            return torch.ones_like(held)  # no release stores them
        if match := _CONSTANT.fullmatch(name):
            return self._constant(match).to(held.device, held.dtype)
        if match := _EXPERTS.fullmatch(name):
            return self._experts(match, held).to(held.device)
        of = _training_name(name)
        if of == "lm_head.weight" and of not in self._stored:
            of = "embedding.weight"
        if of.endswith(".weight" + SCALE):
            return self._scale(of.removesuffix(SCALE)).to(held.device).view_as(held)
        tensor = self._stored[of].to(held.device)
        if of.endswith(".A_log"):
            return -tensor.float().exp()  # where it is held: devices differ in exp's last bit
        if of.endswith(("pass_embeddings", ".pass_gates")):
            return tensor[: self._passes]
        if of.endswith(".conv1d.weight"):
            return tensor.view_as(held)
        if of == "depth_memory.route_projection.weight":
            config = self._stored.config
            widths = [*[config.hidden_size] * 3, config.route_feature_dim]
            mean, summary, difference, history = tensor.split(widths, dim=1)
            return torch.cat([mean, summary, history, difference], dim=1)
        return tensor

    def _experts(self, match: re.Match[str], held: Tensor) -> Tensor:
        """Return the weights (E, rows, columns) or scales of a layer's experts, stacked."""
        projection = "gate_up" if match[2] == "w13" else "down"
        at = f"{_training_name(match[1])}.local_experts"
        experts = range(self._stored.config.n_routed_experts)
        names = [f"{at}.{expert}.{projection}.weight" for expert in experts]
        if match[3] is not None:
            return torch.stack([self._scale(name) for name in names]).view_as(held)
        weights = [self._stored[name] for name in names]
        if weights[0].dtype == FP8 and held.dtype != FP8:  # expanded while loading, on a CPU
            scales = [self._scale(name).view(-1, 1) for name in names]
            weights = [w.float() * scale for w, scale in zip(weights, scales, strict=True)]
        return torch.stack(weights)

    def _scale(self, name: str) -> Tensor:
        """Return the scales of a weight, (rows,) as stored or (1,) as rounding on load implies."""
        if name + SCALE in self._stored:
            return self._stored[name + SCALE].float().reshape(-1)
        return _implied_scale(self._stored[name].to(self._dtype))

    def _compare_rounded(self, name: str, held: Tensor, wanted: Tensor) -> TensorComparison:
        """Compare with the nearest FP8 values under one scale for a tensor, or for an expert."""
        differing, farthest = 0, 0
        pairs = zip(held, wanted, strict=True) if held.dim() == 3 else [(held, wanted)]
        for found, weight in pairs:
            # vLLM, too, multiplies by the reciprocal.
            scaled = weight.float() * (1 / _implied_scale(weight))
            steps = fp8_steps(found, scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8))
            differing += int((steps > 0).sum())
            farthest = max(farthest, int(steps.max()))
        fault = None
        if farthest > 1:
            fault = f"{name}: {differing} of {held.numel()} values are up to {farthest} steps off"
        kind = module_kind(name)
        return TensorComparison(name, kind, held.nbytes, held.numel(), differing, fault, True)

    def _constant(self, match: re.Match[str]) -> Tensor:
        """Return what the plugin computes of weights alone, as the reference computes it."""
        stored, passes = self._stored, self._passes
        if match["mixer"]:
            return stored[f"{_training_name(match['mixer'])}.pass_gates"][:passes].float().tanh()
        if match["memory"] == "entry_bias":
            of_pass = stored["depth_memory.pass_embeddings"][:passes].float()
            return of_pass[:, None] + stored["depth_memory.anchor_embeddings"].float()
        if match["memory"]:
            return self._folded()[match["memory"]]
        at = _training_name(match["connection"])
        connection = HyperConnection(stored.config)
        connection.load_state_dict({key: stored[f"{at}.{key}"] for key in connection.state_dict()})
        place = ("mix", "read", "write").index(match["field"])
        embeddings = stored["pass_embeddings"][:passes]
        with torch.no_grad():
            return torch.stack([connection.coefficients(one)[place] for one in embeddings])

    def _folded(self) -> dict[str, Tensor]:
        """Return the products of the depth memory's weights that stand in for its four linears.

        For entries e, with q = W_q S + b_q, k = W_k e + b_k, v = W_v e + b_v: what a stream is
        multiplied with in q·k and what is left of it, and W_o v + b_o. In float64, rounded once.
        """
        weight, bias = (
            {
                name: self._stored[f"depth_memory.{name}.{kind}"].to(self._dtype).double()
                for name in ("query", "key", "value", "output")
            }
            for kind in ("weight", "bias")
        )
        key = torch.cat([weight["key"], bias["key"][:, None]], dim=1)  # of the entry and of 1
        value = torch.cat([weight["value"], bias["value"][:, None]], dim=1)
        met = weight["query"].T @ key
        added = weight["output"] @ value
        added[:, -1] += bias["output"]
        fold, logit = torch.cat([met, added]), bias["query"] @ key
        return {
            "fold_weight": fold[:, :-1],
            "fold_bias": fold[:, -1],
            "logit_weight": logit[:-1],
            "logit_bias": logit[-1],
        }


def module_kind(name: str) -> str:
    """Return the kind of module that a tensor of vLLM belongs to, or `UNKNOWN`."""
    return next((kind for kind, at in _MODULES if re.search(at, name)), UNKNOWN)


def fp8_steps(one: Tensor, other: Tensor) -> Tensor:
    """Return how many FP8 values apart two tensors are, elementwise, int16; both zeros are one."""

    def position(values: Tensor) -> Tensor:
        code = values.view(torch.uint8).to(torch.int16)
        return torch.where(code < 128, code, 128 - code)

    return (position(one) - position(other)).abs()


def _implied_scale(weight: Tensor) -> Tensor:
    """Return the scale, (1,), float32, under which the largest value is FP8's largest."""
    largest = weight.abs().amax().float().reshape(1)
    return largest / torch.full_like(largest, FP8_MAX)  # by a number, it would be a product


def _fp8_of(name: str) -> bool:
    """Whether a weight is of a kind that FP8 releases and rounding on load make FP8."""
    return bool(_EXPERTS.fullmatch(name)) or kind_of(_training_name(name), KINDS) is not None


def _training_name(name: str) -> str:
    for pattern, new in _TRAINING_NAMES:
        name = pattern.sub(new, name)
    return name


def _bits(values: Tensor) -> Tensor:
    """Return a tensor's bytes as integers: NaN and the sign of zero count too."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    return values.contiguous().view(width)


def _counted(name: str, held: Tensor, wrong: Tensor, how: str) -> TensorComparison:
    differing = int(wrong.sum())
    fault = f"{name}: {differing} of {held.numel()} values {how}" if differing else None
    kind = module_kind(name)
    return TensorComparison(name, kind, held.nbytes, held.numel(), differing, fault)


def _fails(name: str, held: Tensor, reason: str) -> TensorComparison:
    kind = module_kind(name)
    return TensorComparison(
        name, kind, held.nbytes, held.numel(), held.numel(), f"{name}: {reason}"
    )
