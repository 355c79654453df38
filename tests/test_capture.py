"""A capture is the model's run: replayed it gives the same bits, in every mode and at other sizes, and the
model it was taken from has not noticed."""

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from torch import fx, nn

from autotp.capture import CapturedGraph, capture
from autotp.captured import setitem
from autotp.errors import CaptureError
from autotp.ints import Attr, Bin, Const, Dim, TrackedInt
from autotp.skeleton import clone, is_leaf, leaf_class, linear_kind

Inputs = dict[str, Any]
FAMILIES = (
    "bart bert bloom codegen cohere deepseek_v3 falcon_new gemma2 gpt2 gpt_bigcode gpt_oss gptj llama_gqa "
    "mamba mistral mixtral mpt nanogpt opt phi3 qwen3 t5 torch_encoder vit whisper"
).split()
TRAINED = ["bart", "bert", "bloom", "gpt2", "llama_gqa", "mixtral", "opt", "t5", "torch_encoder", "whisper"]


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in flat(part)]


def same(a: Any, b: Any) -> bool:
    return len(flat(a)) == len(flat(b)) > 0 and all(map(torch.equal, flat(a), flat(b)))


def resized(inputs: Inputs, fixed_length: bool) -> Inputs:
    """The same call for 3 sequences of a length of its own; images and sounds keep their size."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        rows = value[:1].repeat(3, *[1] * (value.dim() - 1))
        return rows if fixed_length or value.is_floating_point() else rows[:, : value.shape[1] - 3]

    return {name: one(value) for name, value in inputs.items()}


def ops(captured: CapturedGraph) -> list[Any]:
    return [node.target for node in captured.graph.nodes if node.op.startswith("call_")]


def only(captured: CapturedGraph, target: Any) -> fx.Node:
    (node,) = [node for node in captured.graph.nodes if node.target == target]
    return node


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_is_bit_equal_at_other_sizes(family: str) -> None:
    model, inputs = MODELS[family]()
    captured = capture(model, **inputs)
    unrolled = family == "mamba"  # its scan is a Python loop over the sequence
    with torch.no_grad():
        for given in (inputs, resized(inputs, fixed_length=unrolled)):
            assert same(captured.run(model, **given), model(**given))
        if unrolled:
            with pytest.raises(CaptureError, match="takes another way"):
                captured.run(model, **resized(inputs, fixed_length=False))


@pytest.mark.parametrize("family", TRAINED)
def test_replay_of_training_draws_the_same_dropout_and_gives_the_same_gradients(family: str) -> None:
    model, inputs = MODELS[family]()
    model.train()
    captured = capture(model, **inputs)
    given = resized(inputs, fixed_length=False)
    runs: list[Callable[[], Any]] = [lambda: model(**given), lambda: captured.run(model, **given)]
    results, gradients = [], []
    for run in runs:
        torch.manual_seed(5)
        model.zero_grad()
        result = run()
        sum(t.pow(2).mean() for t in flat(result) if t.is_floating_point()).backward()
        results.append(result)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert same(*results)
    # sums of a backward may be taken in another order: where tensors lie in memory can decide it
    for own, replayed in zip(*gradients, strict=True):
        torch.testing.assert_close(own, replayed, rtol=1e-12, atol=1e-15)
    assert sum(bool(gradient.abs().sum() > 0) for gradient in gradients[0]) > len(gradients[0]) * 0.8


def test_the_output_keeps_its_type() -> None:
    model, inputs = MODELS["llama_gqa"]()
    captured = capture(model, **inputs)
    with torch.no_grad():
        result = captured.run(model, **inputs)
    assert type(result) is type(model(**inputs)) and torch.equal(result.logits, result["logits"])
    assert isinstance(captured.output["logits"], fx.Node)


def test_another_dtype_is_refused() -> None:
    model, inputs = MODELS["llama_gqa"]()
    captured = capture(model, **inputs)
    with pytest.raises(CaptureError, match="was torch.float64 in the capture and is torch.bfloat16 now"):
        captured.run(copy.deepcopy(model).to(torch.bfloat16), **inputs)


# --- the model does not notice --------------------------------------------------------------------


def test_the_model_and_the_random_state_are_untouched() -> None:
    model, inputs = MODELS["gpt2"]()
    called: list[str] = []
    model.transformer.h[0].register_forward_hook(lambda *_: called.append("hook"))
    model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: called.append("pre-hook"))
    model.config.use_cache = False
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    weights = copy.deepcopy(model.state_dict())
    config, random = model.config.to_dict(), torch.get_rng_state()
    capture(model, **inputs)
    assert not called and torch.equal(random, torch.get_rng_state())
    assert model.config.to_dict() == config and type(model.config.n_head) is int
    for path, module in model.named_modules():
        assert vars(module) == before[path] and "forward" not in vars(module)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model(**inputs)
    assert called == ["hook", "pre-hook"]


def test_hooks_that_the_models_own_package_installed_stay() -> None:
    model, inputs = MODELS["llama_gqa"]()
    inputs = {**inputs, "output_hidden_states": True}
    with torch.no_grad():
        expected = model(**inputs)  # transformers installs hooks that collect the states
        assert same(capture(model, **inputs).run(model, **inputs), expected)
    assert len(expected.hidden_states) == 3


def test_a_failing_forward_is_located_and_leaves_nothing_behind() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(7, 7, 7)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Outer()
    line = Inner.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        CaptureError, match=rf"inner \(.*test_capture\.py:{line} in forward\) raised RuntimeError"
    ):
        capture(model, x=torch.ones(2, 3))
    assert "forward" not in vars(model) and torch.ones(2).add(1).tolist() == [2, 2]
    assert not torch.overrides._get_current_function_mode_stack()


def test_capture_needs_no_weights() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=2, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    captured = capture(model)
    assert all(p.is_meta for p in model.parameters())
    weight = captured.skeleton.get_parameter("model.layers.0.self_attn.k_proj.weight")
    assert weight.shape == (1024, 16384) and isinstance(weight, nn.Parameter)


def test_ties_are_one_parameter() -> None:
    model, inputs = MODELS["llama_tied"]()
    skeleton = clone(model).module
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight


def test_experts_and_attention_that_cannot_be_recorded_are_captured_in_a_form_that_can() -> None:
    model, inputs = MODELS["mixtral"]()
    model.set_experts_implementation("eager")
    captured = capture(model, **inputs)
    assert torch.bmm in ops(captured) and model.config._experts_implementation == "eager"
    with torch.no_grad():
        torch.testing.assert_close(captured.run(model, **inputs).logits, model(**inputs).logits)


# --- values ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """A module that runs the function it is given."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def replayed(function: Callable[..., Any], **attributes: Any) -> CapturedGraph:
    """The capture of `function` as a module, found equal to eager at two sizes."""
    model = Net(function, **attributes)
    captured = capture(model, x=torch.randn(2, 12, 6, dtype=torch.float64))
    for shape in ((2, 12, 6), (3, 5, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.manual_seed(1)
        expected = model(x.clone())
        torch.manual_seed(1)
        assert same(captured.run(model, x=x.clone()), expected)
    return captured


def test_in_place_calls_are_replayed_in_order() -> None:
    def body(self: Net, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        before = y + 0
        y += 1
        y[:, 0] = 5
        y[:, 1].mul_(3)
        row = y[0]
        row.zero_()
        return before + y

    captured = replayed(body)
    assigned = only(captured, setitem)
    assert assigned.meta["args"][0].target is torch.Tensor.add_
    # zero_ on a view: the values of the views and of what they look at change with it
    changed = only(captured, torch.Tensor.zero_).meta["mutates"]
    assert assigned in changed and len(changed) == 3
    final = [node for node in captured.graph.nodes if node.target is torch.Tensor.add][-1]
    assert final.meta["args"][1] is assigned


def test_a_call_that_gives_back_its_operand_is_a_value_of_its_own() -> None:
    captured = replayed(lambda self, x: (x.contiguous() * 2, x.double() + 1, x))
    doubled, raised, given = captured.output
    assert doubled.args[0].target is torch.Tensor.contiguous and raised.args[0].target is torch.Tensor.double
    assert given.op == "placeholder" and given is doubled.args[0].args[0] is raised.args[0].args[0]


def test_sizes_stay_nodes() -> None:
    def body(self: Net, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        y = x.view(b * s, d).view(*x.shape[:-1], 2, -1).reshape(x.size(0), x.size()[1] * 2, 3)
        table = torch.arange(s * 2).view(1, -1, 1) / x.shape[1] + torch.zeros(b, 1, d // 2)
        return y + table + x.numel() / (b * 1.0)

    replayed(body)


def test_a_size_is_that_of_its_time() -> None:
    def body(self: Net, x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        n = y.shape[1]
        y.transpose_(0, 1)
        return y.reshape(n, y.shape[1], -1)

    replayed(body)


def test_arguments_keep_their_expressions() -> None:
    def body(self: Net, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.num_heads, self.size // 2)

    captured = capture(Net(body, num_heads=3, size=4), x=torch.randn(2, 12, 6))
    node = only(captured, torch.Tensor.view)
    x, batch, free, heads, size = node.meta["args"]
    assert x.op == "placeholder" and batch.expr == Dim(x, 0) and type(free) is int
    assert heads.expr == Attr("", "num_heads") and size.expr == Bin("floordiv", Attr("", "size"), Const(2))
    assert node.args[1].target is torch.Tensor.size and node.args[2:] == (-1, 3, 2)
    assert type(node.args[3]) is int and captured.attributes["", "size"] == 4


def test_shared_config_is_tracked_per_module() -> None:
    model, inputs = MODELS["llama_gqa"]()
    captured = capture(model, **inputs)
    paths = [f"model.layers.{i}.self_attn" for i in range(2)]
    ints = [captured.skeleton.get_submodule(path).config.num_attention_heads for path in paths]
    assert [n.expr for n in ints] == [Attr(path, "config.num_attention_heads") for path in paths]
    assert all(isinstance(captured.skeleton.get_submodule(path).head_dim, TrackedInt) for path in paths)
    assert type(captured.skeleton.get_submodule(paths[0]).q_proj.in_features) is int


def test_a_bare_read_of_an_attribute_is_reported_where_it_happens() -> None:
    def body(self: Net, x: torch.Tensor) -> torch.Tensor:
        return x / float(self.num_heads)

    captured = capture(Net(body, num_heads=3), x=torch.randn(2, 3))
    (frame,) = captured.escapes[Attr("", "num_heads")]
    assert (frame.code, frame.lineno) == (body.__code__, body.__code__.co_firstlineno + 1)


def test_tuples_iteration_and_properties() -> None:
    def body(self: Net, x: torch.Tensor) -> dict[str, Any]:
        a, b, c = x.split(2, dim=-1)
        values, places = x.max(dim=-1)
        rows = [row * i for i, row in enumerate(x[:2])]
        return {"a": a @ b.mT, "n": (values, [places]), "rows": torch.stack(rows), "c": c[0].T.T, "k": 3}

    captured = replayed(body)
    assert captured.output["k"] == 3


def test_random_numbers_and_factories_are_recorded() -> None:
    replayed(
        lambda self, x: (
            x + torch.rand(x.shape[1], 1) + torch.full_like(x, 2) * x.new_ones(6) + torch.tensor(0.5)
        )
    )


def test_tensors_from_elsewhere_are_constants() -> None:
    outside = torch.randn(6)

    def body(self: Net, x: torch.Tensor) -> torch.Tensor:
        return x * outside + self.table + self.register

    captured = replayed(body, table=torch.randn(6), register=nn.Parameter(torch.randn(6)))
    values = list(captured.constants.values())
    assert len(values) == 2 and values[0] is outside
    assert [n.target for n in captured.graph.nodes if n.op == "get_attr"] == [
        "_const0",
        "_const1",
        "register",
    ]


def test_gradient_flags_and_no_grad_are_kept() -> None:
    def body(self: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (x * self.w).exp()
        return x * self.w * scale

    model = Net(body, w=nn.Parameter(torch.randn(6, dtype=torch.float64)))
    with torch.no_grad():
        captured = capture(model, x=torch.randn(2, 6, dtype=torch.float64))
    flags = [node.meta["grad"] for node in captured.graph.nodes if node.target is torch.Tensor.mul]
    assert flags == [False, True, True]
    x = torch.randn(3, 6, dtype=torch.float64)
    (expected,) = torch.autograd.grad(model(x).sum(), [model.w])
    (got,) = torch.autograd.grad(captured.run(model, x=x).sum(), [model.w])
    assert torch.equal(expected, got)


def test_an_autograd_function_keeps_its_backward() -> None:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: int) -> torch.Tensor:
            return (x * scale).round() / scale

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # straight through
            return grad, None

    model = Net(lambda self, x: Round.apply(x * self.w, 4) * 3, w=nn.Parameter(torch.randn(6)))
    captured = capture(model, x=torch.randn(2, 6))
    inside = [node for node in captured.graph.nodes if "custom_grad" in node.meta]
    assert [node.target for node in inside] == [torch.Tensor.mul, torch.Tensor.round, torch.Tensor.div]
    x = torch.randn(3, 6)
    (expected,) = torch.autograd.grad(model(x).sum(), [model.w])
    out = captured.run(model, x=x)
    (got,) = torch.autograd.grad(out.sum(), [model.w])
    assert torch.equal(expected, got) and expected.abs().sum() > 0 and torch.equal(out, model(x))


def test_nested_inputs() -> None:
    class Pair(nn.Module):
        def forward(
            self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], flag: bool = False
        ) -> torch.Tensor:
            return pair[0] - pair[1]["b"] if flag else pair[0] + pair[1]["b"]

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    captured = capture(Pair(), pair=(a, {"b": b}), flag=True)
    assert [n.target for n in captured.graph.nodes if n.op == "placeholder"] == ["pair_0", "pair_1_b"]
    assert torch.equal(captured.run(Pair(), pair=(b, {"b": a}), flag=True), b - a)
    with pytest.raises(CaptureError, match=r"inputs\['flag'\] was True in the capture and is False"):
        captured.run(Pair(), pair=(a, {"b": b}), flag=False)
    with pytest.raises(CaptureError, match="keys"):
        captured.run(Pair(), pair=(a, {"b": b}))


# --- what a replay refuses ------------------------------------------------------------------------


def test_a_loop_over_a_size_is_refused_at_another_size() -> None:
    def body(self: Net, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        for i in range(x.shape[1]):
            state = state * 0.5 + x[:, i]
        return state

    model = Net(body)
    captured = capture(model, x=torch.randn(2, 4, 3))
    x = torch.randn(5, 4, 3)
    assert torch.equal(captured.run(model, x=x), model(x))
    with pytest.raises(CaptureError, match=r"takes another way.*in body\)"):
        captured.run(model, x=torch.randn(2, 6, 3))  # too long: nothing but the check would notice


def test_the_other_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
    captured = capture(model, input=torch.ones(2, 3))
    with pytest.raises(CaptureError, match=r"captured in eval mode.*model\.eval\(\)"):
        captured.run(model.train(), input=torch.ones(2, 3))


@pytest.mark.parametrize("read", [lambda x: bool(x.sum() > 0), lambda x: x.sum().item()])
def test_reading_data_is_an_error_that_says_where(read: Callable[[torch.Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Net(lambda self, x: x * 2 if read(x) is not None else x))
    with pytest.raises(
        CaptureError, match=r"^1 \(.*test_capture\.py:\d+ .*needs the values of a tensor \(aten"
    ):
        capture(model, input=torch.ones(2, 3))


# --- sites and module calls -----------------------------------------------------------------------


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        hidden = helper(self.up(x))
        return self.down(hidden) * scale


def test_sites_say_where_in_the_source() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x, scale=2.0) + 1

    captured = capture(Model(), x=torch.randn(2, 6))
    first = Block.forward.__code__.co_firstlineno
    gelu, up = only(captured, F.gelu), only(captured, "block.up")
    assert gelu.meta["scope"] == up.meta["scope"] == gelu.meta["site"].module == "block"
    assert [frame.code for frame in gelu.meta["site"].frames] == [Block.forward.__code__, helper.__code__]
    assert [frame.lineno for frame in gelu.meta["site"].frames] == [
        first + 1,
        helper.__code__.co_firstlineno + 1,
    ]
    assert [(f.code, f.lineno) for f in up.meta["site"].frames] == [(Block.forward.__code__, first + 1)]
    if sys.version_info >= (3, 11):
        positions = list(Block.forward.__code__.co_positions())
        _, _, start, end = positions[up.meta["site"].frames[-1].lasti // 2]
        assert "        hidden = helper(self.up(x))"[start:end] == "self.up(x)"


def test_module_calls() -> None:
    model = nn.Sequential(Block(), nn.Tanh())
    captured = capture(model, input=torch.randn(2, 6))
    assert [(call.path, call.leaf) for call in captured.calls] == [
        ("0", False), ("0.up", True), ("0.down", True), ("1", True),
    ]  # fmt: skip
    nodes = list(captured.graph.nodes)
    block, up, down, tanh = captured.calls
    assert block.args == (nodes[0],) and [n.name for n in nodes[block.first : block.last + 1]] == [
        "_0_up", "gelu", "_0_down", "mul",
    ]  # fmt: skip
    assert block.output.target is torch.Tensor.mul and block.node is None and tanh.args == (block.output,)
    assert up.node is up.output and nodes[up.first] is up.node and up.first == up.last


def test_decorated_and_overridden_forwards_are_intercepted() -> None:
    import functools
    import inspect

    def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            assert set(inspect.signature(self.forward).parameters) == {"x"}
            return forward(self, *args, **kwargs) * 2

        return wrapper

    class Decorated(nn.Module):
        @doubled
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = Decorated()
    inner = nn.Linear(6, 6)
    plain_forward = inner.forward
    inner.forward = lambda input: plain_forward(input).relu()  # type: ignore[method-assign]
    model = nn.Sequential(model, inner)
    captured = capture(model, input=torch.randn(2, 6))
    assert ops(captured) == [torch.Tensor.add, torch.Tensor.mul, F.linear, torch.Tensor.relu]
    add = only(captured, torch.Tensor.add)
    assert [f.code for f in add.meta["site"].frames] == [inspect.unwrap(Decorated.forward).__code__]
    x = torch.randn(3, 6)
    assert torch.equal(captured.run(model, input=x), model(x))


# --- leaves ---------------------------------------------------------------------------------------


class Transposed(nn.Module):
    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))
        self.alpha = alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return (out if self.alpha == 1.0 else out * self.alpha).view(*x.shape[:-1], -1)


class Renamed(nn.Linear):
    pass


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_leaves_are_told_by_what_they_do() -> None:
    assert leaf_class(Renamed(3, 4)) is nn.Linear and linear_kind(Renamed(3, 4)) == "linear"
    assert not is_leaf(Scaled(3, 4)) and linear_kind(Scaled(3, 4)) is None
    assert linear_kind(Transposed()) == "transposed" and is_leaf(Transposed())
    assert linear_kind(Transposed(alpha=2.0)) is None and not is_leaf(Transposed(alpha=2.0))
    assert not is_leaf(nn.Sequential(nn.ReLU())) and is_leaf(nn.MultiheadAttention(4, 2))
    model, _ = MODELS["gpt2"]()
    assert linear_kind(model.transformer.h[0].mlp.c_fc) == "transposed"


def test_computed_weights_are_no_leaves() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = torch.nn.utils.weight_norm(nn.Linear(6, 6))
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    for layer in (old, new):
        assert not is_leaf(layer)
        model = nn.Sequential(layer, nn.ReLU())
        captured = capture(model, input=torch.randn(2, 6))
        assert any("weight_g" in str(n.target) or "original0" in str(n.target) for n in captured.graph.nodes)
        x = torch.randn(3, 6)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
            assert torch.equal(captured.run(model, input=x), model(x))


def test_a_leaf_can_be_the_model() -> None:
    layer = nn.Linear(3, 4)
    captured = capture(layer, input=torch.randn(2, 3))
    x = torch.randn(5, 3)
    assert torch.equal(captured.run(layer, input=x), layer(x))


def test_what_fake_tensors_call_themselves_is_not_recorded() -> None:
    """An autograd function that saves its output detaches it: on fake tensors by calls that depend on what
    their cache holds, so that two captures of one model would differ."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = x.exp()
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (out,) = ctx.saved_tensors
            return grad * out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(7, 11)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Keeps.apply(self.up(x)).sum(1)

    for _ in range(2):
        nodes = capture(Model(), x=torch.randn(13, 7)).graph.nodes
        assert [n.target for n in nodes if isinstance(n.target, torch._ops.OpOverload)] == []
