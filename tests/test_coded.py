"""Weights that compressed-tensors keeps as several tensors, over ranks against the whole quantised model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autotp
from autotp.coded import CodedWeight
from autotp.comm import Comm, simulate
from autotp.errors import PlanError
from autotp.mesh import Mesh
from autotp.quantised import Packed, components, is_packed

QUIET = pytest.mark.filterwarnings("ignore:.*stay whole")
ROW, COLUMN = "RowParallelLinear", "ColumnParallelLinear"


@pytest.fixture(scope="module")
def ct() -> Any:
    return pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")


def quantised(name: str, family: str = "llama_gqa", group: int = 32, **more: Any) -> tuple[Any, dict]:
    """A model with scales of its weights' extremes, ready to be stored."""
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    config, cls, settings = models.TEXT[family]
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    sizes |= {"head_dim": 32} if family == "llama_gqa" else {}
    model, inputs = models.hf(config, cls, dtype=torch.float32, **{**settings, **sizes, **more})
    scheme = preset_name_to_scheme(name, ["Linear"])
    weights = scheme.weights
    if weights.strategy == "group":
        weights.group_size = group
    if weights.strategy == "block":
        weights.block_structure = [32, 32]
    told = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen")
    apply_quantization_config(model, told, show_progress=False)
    for module in model.modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        weight = module.weight.detach()
        if weights.strategy == "group":
            low, high = torch.aminmax(weight.unflatten(1, (-1, group)), dim=-1)
        elif weights.strategy == "block":
            blocks = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        elif weights.strategy == "channel":
            low, high = torch.aminmax(weight, dim=1, keepdim=True)
        else:
            low, high = weight.min().view(1), weight.max().view(1)
        scale, _ = calculate_qparams(low, high, weights)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.05)
    return model, inputs


def stored(model: Any, path: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor

    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(str(path))


def loaded(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path)


def held(model: nn.Module) -> int:
    """Bytes of the parameters."""
    found = [c for p in model.parameters() for c in (components(p).values() if is_packed(p) else (p,))]
    return sum(t.numel() * t.element_size() for t in found)


def outputs(model: Any, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@QUIET
@pytest.mark.parametrize(
    ("scheme", "family", "o_proj", "down_proj"),
    [
        ("W4A16", "llama_gqa", ROW, ROW),
        ("W4A16", "phi3", ROW, ROW),  # q, k, v in one weight: a rank's rows are of three ranges
        ("W8A8", "llama_gqa", COLUMN, COLUMN),  # one scale for all of a token's activations
        ("FP8", "llama_gqa", ROW, ROW),  # one scale, and one of the activations, that was calibrated
        ("FP8_BLOCK", "llama_gqa", COLUMN, ROW),  # a scale for each 128 activations: o_proj has 64 on a rank
    ],
)
def test_as_the_whole_model(
    ct: Any, scheme: str, family: str, o_proj: str, down_proj: str, tmp_path: Path
) -> None:
    """Logits, state and memory; packed before and after; planning changes nothing."""
    model, inputs = quantised(scheme, family, num_hidden_layers=1)
    stored(model, tmp_path)
    whole = loaded(tmp_path)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    want = outputs(copy.deepcopy(whole), inputs)
    plan = autotp.plan(whole, 2)
    assert list(whole.state_dict()) == list(state) and hasattr(whole, "ct_decompress_hook")

    def one(comm: Comm) -> Any:
        local: Any = autotp.parallelize(copy.deepcopy(whole), comm=comm)
        assert local.autotp.plan.digest == plan.digest
        logits = outputs(local, inputs)
        full = autotp.full_state_dict(local)
        assert full.keys() == state.keys()
        assert all(torch.equal(full[name], state[name]) for name in state)
        doubled = {name: t + 1 if name.endswith("_scale") else t for name, t in full.items()}
        local.load_state_dict(doubled)
        again = autotp.full_state_dict(local)
        assert all(torch.equal(again[name], doubled[name]) for name in doubled)
        return logits, local

    for logits, local in simulate(2, one):
        layer = local.model.layers[0]
        assert type(layer.self_attn.o_proj).__name__ == o_proj
        assert type(layer.mlp.down_proj).__name__ == down_proj
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5
        assert isinstance(layer.mlp.down_proj.weight, CodedWeight)
        assert not any(p.requires_grad for p in local.parameters() if is_packed(p))
        assert held(local.model.layers) < 0.6 * held(whole.model.layers)


@QUIET
def test_no_cut_inside_of_a_group(ct: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half of 144 inputs would end inside of a group of 48: the inputs stay whole. Such a plan is not kept
    for other models: the cuts were tried on this one's weights."""
    monkeypatch.setenv("AUTOTP_PLANS", str(tmp_path / "plans"))
    model, inputs = quantised(
        "W4A16", group=48, hidden_size=96, intermediate_size=144, head_dim=24, num_hidden_layers=1
    )
    stored(model, tmp_path)
    want = outputs(loaded(tmp_path), inputs)
    models = [loaded(tmp_path) for _ in range(2)]  # not in the ranks' threads: while it loads, transformers
    # replaces its own functions, tie_weights say, for all threads, and a second thread's would stay replaced

    def one(comm: Comm) -> Any:
        local = autotp.parallelize(models[comm.rank], comm=comm)
        return outputs(local, inputs), local

    found = simulate(2, one)
    assert not (tmp_path / "plans").exists()
    for logits, local in found:
        assert type(local.model.layers[0].mlp.down_proj).__name__ == COLUMN
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5


@QUIET
def test_verify_and_generation(ct: Any, tmp_path: Path) -> None:
    model, _ = quantised("W4A16")
    stored(model, tmp_path)
    assert autotp.verify(loaded(tmp_path), tp=2, steps=0).raise_if_wrong()


def contents(path: Path) -> dict[str, Any]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@QUIET
@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_load_and_save(ct: Any, scheme: str, tmp_path: Path) -> None:
    """Straight from the files to the ranks, over stages too; and back, byte for byte what the whole model
    writes."""
    model, inputs = quantised(scheme)
    stored(model, tmp_path / "q")
    whole = loaded(tmp_path / "q")
    for limit in ("50GB", "100KB"):
        whole.save_pretrained(tmp_path / limit, max_shard_size=limit)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    want = outputs(whole, inputs)

    def one(comm: Comm) -> Any:
        local: Any = autotp.load(tmp_path / "q", comm=Mesh.split(comm, tp, 2 // tp), progress=False)
        for limit in ("50GB", "100KB"):
            local.save_pretrained(tmp_path / f"{tp}-{limit}", max_shard_size=limit)
        full = autotp.full_state_dict(local)
        assert all(torch.equal(full[name], tensor) for name, tensor in state.items())
        return outputs(local, inputs)

    for tp in (1, 2):
        for logits in simulate(2, one):
            assert float((logits - want).abs().max() / want.abs().max()) < 1e-5
        for limit in ("50GB", "100KB"):
            assert contents(tmp_path / f"{tp}-{limit}") == contents(tmp_path / limit)


@QUIET
def test_another_dtype(ct: Any, tmp_path: Path) -> None:
    """Scales in the dtype that was asked for, as transformers has them."""
    import transformers

    model, inputs = quantised("W4A16")
    stored(model, tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    want = outputs(whole, inputs).float()

    def one(comm: Comm) -> Any:
        local: Any = autotp.load(tmp_path, comm=comm, dtype=torch.bfloat16, progress=False)
        assert local.model.layers[0].mlp.up_proj.weight.weight_scale.dtype == torch.bfloat16
        return outputs(local, inputs)

    for logits in simulate(2, one):
        assert logits.dtype == torch.bfloat16
        assert float((logits.float() - want).abs().max() / want.abs().max()) < 3e-2


def test_refused_by_name(ct: Any, tmp_path: Path) -> None:
    frozen, inputs = quantised("W4A16")
    with pytest.raises(PlanError, match=r"layers\.0\.self_attn\.q_proj is still being quantised \(frozen\)"):
        autotp.plan(frozen, 2)
    stored(frozen, tmp_path)
    called = loaded(tmp_path)
    outputs(called, inputs)
    with pytest.raises(PlanError, match=r"layers\.0\.self_attn\.q_proj is unpacked: .* first call"):
        autotp.plan(called, 2)
    odd = loaded(tmp_path)
    odd.model.layers[1].self_attn.quantization_scheme = odd.model.layers[0].mlp.up_proj.quantization_scheme
    odd.model.layers[1].self_attn.quantization_status = odd.model.layers[0].mlp.up_proj.quantization_status
    with pytest.raises(PlanError, match=r"layers\.1\.self_attn is quantised .* no linear"):
        autotp.plan(odd, 2)


def test_dense_by_request(ct: Any, tmp_path: Path) -> None:
    """Unpacked by transformers on loading, where the user says so: a model like others."""
    import transformers

    model, inputs = quantised("W4A16")
    stored(model, tmp_path)
    how = transformers.CompressedTensorsConfig(dequantize=True)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how)
    want = outputs(whole, inputs)

    def one(comm: Comm) -> Any:
        return outputs(autotp.parallelize(copy.deepcopy(whole), comm=comm), inputs)

    for logits in simulate(2, one):
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5


# ---------------------------------------------------------------- without any package
@dataclass(frozen=True)
class Scaled:
    """Ints and scales; `order`: the columns lie in another order than the inputs'."""

    order: bool = False

    def product(self, parts: Mapping[str, Any], shape: Any, dtype: Any, x: Any, bias: Any) -> torch.Tensor:
        weight = parts["ints"].float()
        scale = parts["scale"].repeat_interleave(shape[1] // parts["scale"].shape[1], 1)
        weight = (weight * scale).to(dtype)
        return F.linear(x, weight.flip(1) if self.order else weight, bias)


def coded(order: bool = False) -> nn.Linear:
    linear = nn.Linear(64, 48, bias=False)
    parts = {"ints": torch.randint(-8, 8, (48, 64), dtype=torch.int8), "scale": torch.rand(48, 4) + 0.5}
    weight = CodedWeight(parts, Scaled(order), (48, 64), torch.float32)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def test_cuts_are_tried() -> None:
    def why(linear: nn.Linear, dim: int, *bounds: int) -> str | None:
        layout = tuple(((a, b),) for a, b in zip(bounds, bounds[1:], strict=False))
        return Packed.of(linear).unfit("weight", {dim: layout})

    assert why(coded(), 0, 0, 5, 48) is None and why(coded(), 1, 0, 16, 64) is None
    assert "one entry of scale stands for more than 0:24 of 64" in (why(coded(), 1, 0, 24, 64) or "")
    assert why(coded(order=True), 0, 0, 5, 48) is None
    assert "parts along its inputs give other products" in (why(coded(order=True), 1, 0, 16, 64) or "")


def test_a_coded_weight_is_a_tensor() -> None:
    linear = coded()
    x = torch.randn(2, 64)
    twin = copy.deepcopy(linear)
    twin.weight.scale.mul_(2)
    assert torch.allclose(2 * linear(x), twin(x))
    linear.load_state_dict(twin.state_dict())
    assert torch.equal(linear(x), twin(x)) and linear.weight.scale is not twin.weight.scale
    assert linear.to("meta").weight.ints.is_meta
    assert "ints torch.int8 [48, 64]" in repr(twin.weight)
    with pytest.raises(NotImplementedError, match="kept as ints, scale"):
        twin.weight + 1
