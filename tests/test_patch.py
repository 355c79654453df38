"""A module's own forward, rewritten at single call sites."""

import ast
import copy
import functools
import inspect
import pickle
import sys
import traceback

import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from torch import nn
from torch.overrides import TorchFunctionMode

from autotp.errors import PatchError
from autotp.patch import SitePatch, patch_forward, patched_source
from autotp.sites import Site, frames_below
from autotp.source import definition_of

CALL = nn.Module._call_impl.__code__


class Sites(TorchFunctionMode):
    """Records the sites of the operations that run in one module's own forward."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.found = []  # (name of the operation, Site, args)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        outer = frame
        while outer is not None and outer.f_code is not CALL:
            outer = outer.f_back
        if outer is not None and outer.f_locals["self"] is self.module:
            frames = frames_below(frame, CALL, inspect.unwrap(type(self.module).forward).__code__)
            self.found.append((func.__name__, Site("m", frames), args))
        return func(*args, **(kwargs or {}))

    def named(self, name):
        return [site for n, site, _ in self.found if n == name]


def record(module, *args, run=None, **kwargs):
    with torch.no_grad(), Sites(module) as sites:
        (run or module)(*args, **kwargs)
    return sites


def double(x):
    return 2 * x


X = torch.arange(24, dtype=torch.float64).view(2, 12) / 7


class Kinds(nn.Module):
    """Every kind of expression, each on a value of its own."""

    def forward(self, x, n=3):
        view = x.view(2, n, 4)
        chain = x.reshape(2, 4, n).transpose(1, 2).contiguous()
        shape = (2, n, 4)
        star = x.view(*shape)
        whole = x.view(shape)
        linear = F.linear(x, x, bias=None)
        joined = torch.cat([x, x + 1], dim=-1)
        product = x @ x.t()
        right = 3.0 - x
        negative = -x
        larger = x > 1.5
        part = x[:, 1:n]
        stored = torch.zeros_like(x)
        stored[:, :n] = x[:, :n]
        added = x.clone()
        added += 1
        part_of = x.clone()
        part_of[0] *= 5
        turned = x.T
        soft = F.softmax(x, -1)
        each = [row.mul(2) for row in (x, x * 2)]
        return dict(
            view=view,
            chain=chain,
            star=star,
            whole=whole,
            linear=linear,
            joined=joined,
            product=product,
            right=right,
            negative=negative,
            larger=larger,
            part=part,
            stored=stored,
            added=added,
            part_of=part_of,
            turned=turned,
            soft=soft,
            each0=each[0],
            each1=each[1],
        )


K = X.clone()
# operation, which of its sites, patch, the results that change
CASES = [
    ("view", 0, SitePatch(ints={(2,): 4, (3,): 3}), {"view": K.view(2, 4, 3)}),
    ("view", 0, SitePatch(before={(0,): double}), {"view": 2 * K.view(2, 3, 4)}),
    ("reshape", 0, SitePatch(ints={(2,): 2, (3,): 6}), {"chain": K.reshape(2, 2, 6).transpose(1, 2)}),
    ("transpose", 0, SitePatch(ints={(1,): 0}), {"chain": K.reshape(2, 4, 3).transpose(0, 2)}),
    ("contiguous", 0, SitePatch(after=double), {"chain": 2 * K.reshape(2, 4, 3).transpose(1, 2)}),
    ("view", 1, SitePatch(ints={(2,): 6, (3,): 2}), {"star": K.view(2, 6, 2)}),
    ("view", 2, SitePatch(ints={(1, 1): 6, (1, 2): 2}), {"whole": K.view(2, 6, 2)}),
    ("linear", 0, SitePatch(before={(1,): double}), {"linear": 2 * K @ K.t()}),
    ("cat", 0, SitePatch(ints={("dim",): 0}), {"joined": torch.cat([K, K + 1])}),
    ("cat", 0, SitePatch(before={(0, 1): double}), {"joined": torch.cat([K, 2 * K + 2], -1)}),
    ("matmul", 0, SitePatch(after=double), {"product": 2 * K @ K.t()}),
    ("rsub", 0, SitePatch(before={(0,): double}), {"right": 3.0 - 2 * K}),
    ("neg", 0, SitePatch(after=double), {"negative": -2 * K}),
    ("gt", 0, SitePatch(ints={(1,): 2}), {"larger": K > 2}),
    ("getitem", 0, SitePatch(ints={(1, 1, "stop"): 5}), {"part": K[:, 1:5]}),
    ("getitem", 0, SitePatch(before={(0,): double}), {"part": 2 * K[:, 1:3]}),
    ("setitem", 0, SitePatch(before={(2,): double}), {"stored": torch.cat([2 * K[:, :3], 0 * K[:, 3:]], 1)}),
    ("add_", 0, SitePatch(ints={(1,): 10}), {"added": K + 10}),
    ("mul_", 0, SitePatch(ints={(1,): 2}), {"part_of": torch.stack([K[0] * 2, K[1]])}),
    ("T", 0, SitePatch(after=double), {"turned": 2 * K.T}),
    ("softmax", 0, SitePatch(ints={("dim",): 0}), {"soft": F.softmax(K, 0)}),
    ("mul", -1, SitePatch(after=double), {"each0": 4 * K, "each1": 8 * K}),
]
ALIASES = {
    "getitem": "__getitem__", "setitem": "__setitem__", "T": "__get__",
    "rsub": "__rsub__", "matmul": "__matmul__", "gt": "__gt__", "neg": "__neg__",
}  # fmt: skip


@pytest.mark.parametrize(("name", "which", "patch", "changed"), CASES, ids=lambda v: str(v)[:30])
def test_each_kind_of_expression(name, which, patch, changed):
    module = Kinds()
    sites = record(module, X)
    found = sites.named(name) or sites.named(ALIASES.get(name, name))
    before = module(X)
    patch_forward(module, {found[which]: patch})
    after = module(X)
    for key, value in before.items():
        expected = changed.get(key, value)
        assert after[key].shape == expected.shape and torch.equal(after[key], expected), key


def test_trivial_patches_everywhere_change_nothing():
    module = Kinds()
    sites = record(module, X)
    (item,) = sites.named("mul_")  # `part_of[0] *= 5` also loads and stores an item
    before = module(X)
    line = item.frames[-1].lineno
    patches = {s: SitePatch() for _, s, _ in sites.found if s == item or s.frames[-1].lineno != line}
    patch_forward(module, patches)
    after = module(X)
    assert len(patches) > 20
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_the_item_of_an_augmented_assignment_is_refused():
    module = Kinds()
    store = record(module, X).named("__setitem__")[-1]
    with pytest.raises(PatchError, match="augmented"):
        patch_forward(module, {store: SitePatch()})
    assert "forward" not in vars(module)


def test_the_node_of_every_site_is_the_operation_that_was_recorded():
    nodes = dict.fromkeys(("__rsub__", "add", "matmul"), ast.BinOp) | {"neg": ast.UnaryOp, "gt": ast.Compare}
    nodes |= {"__getitem__": ast.Subscript, "__setitem__": ast.Subscript, "__get__": ast.Attribute}
    nodes |= {"add_": ast.AugAssign, "mul_": ast.AugAssign}
    definition = definition_of(Kinds.forward.__code__)
    found = record(Kinds(), X)
    (item,) = found.named("mul_")
    names = []
    for name, site, _ in found.found:
        if site != item and site.frames[-1].lineno == item.frames[-1].lineno:
            continue
        node = definition.node_at(site.frames[-1].code, site.frames[-1].lasti)
        if isinstance(node, ast.Call):
            names.append((name, node.func.attr))
        elif name != "mul":  # a method in one place, an operator in another
            assert isinstance(node, nodes[name]), (name, ast.unparse(node))
    assert len(names) >= 12 and all(name == method for name, method in names)


# --- functions on the way -----------------------------------------------------------------------------------


def heads_of(x, n):
    return x.view(x.shape[0], n, -1)


def by_default(x, n):
    return heads_of(x, n) + 1


def another(x, n):
    return x.view(x.shape[0], n, -1) + 2


def scaled(fn):
    @functools.wraps(fn)
    def wrapper(self, *args, **kwargs):
        return fn(self, *args, **kwargs) * self.scale

    return wrapper


class Helped(nn.Module):
    scale = 3.0
    interface = staticmethod(by_default)

    def _shape(self, x):
        return x.view(2, 4, 3)

    @scaled
    def forward(self, x):
        first = self._shape(x)
        second = self._shape(x + 1)
        indirect = self.interface
        third = indirect(x, 4)
        fourth = heads_of(x, 4)
        return torch.stack([first, second, third, fourth])


def depth(site):
    return [f.code.co_name for f in site.frames]


def test_a_method_called_twice_is_patched_at_one_call():
    module = Helped()
    expected = module(X).clone()
    first, second, third, fourth = record(module, X).named("view")
    assert depth(first) == ["forward", "_shape"] and depth(third) == ["forward", "by_default", "heads_of"]
    patch_forward(module, {second: SitePatch(after=double)})
    expected[1] *= 2
    assert torch.equal(module(X), expected)
    assert torch.equal(module._shape(X), X.view(2, 4, 3))


def test_functions_by_name_and_by_variable():
    module = Helped()
    expected = module(X).clone()
    first, second, third, fourth = record(module, X).named("view")
    patch_forward(module, {third: SitePatch(before={(0,): double}), fourth: SitePatch(after=double)})
    expected[2] = 3 * (2 * X.view(2, 4, 3) + 1)
    expected[3] *= 2
    assert torch.equal(module(X), expected)
    assert torch.equal(heads_of(X, 4), X.view(2, 4, 3))


def test_another_function_at_the_recorded_call_is_an_error():
    module = Helped()
    third = record(module, X).named("view")[2]
    patch_forward(module, {third: SitePatch(after=double)})
    module.interface = another
    with pytest.raises(PatchError, match=r"test_patch.py:\d+: calls another, but by_default"):
        module(X)


def test_a_decorated_forward_stays_decorated():
    module = Helped()
    first = record(module, X).named("view")[0]
    patch_forward(module, {first: SitePatch(after=double)})
    assert torch.equal(module(X)[0], 3.0 * 2 * X.view(2, 4, 3))
    assert list(inspect.signature(module.forward).parameters) == ["x"]
    assert module.forward.__wrapped__ is not Helped.forward.__wrapped__


class Base(nn.Module):
    def forward(self, x):
        return x.view(2, 4, 3)


class Derived(Base):
    def forward(self, x):
        return super().forward(x) + torch.add(x, 1).view(2, 4, 3)


def make_class(offset):
    class Local(nn.Module):
        def forward(self, x):
            return (lambda y: y.view(2, 4, 3) + offset)(x) + __class__.extra

        extra = 0.5

    return Local


def test_super_and_the_function_of_the_base_class():
    module = Derived()
    inherited, own = record(module, X).named("view")
    patch_forward(module, {inherited: SitePatch(after=double), own: SitePatch(after=double)})
    assert torch.equal(module(X), 2 * X.view(2, 4, 3) + 2 * (X + 1).view(2, 4, 3))
    assert torch.equal(Derived()(X), X.view(2, 4, 3) + (X + 1).view(2, 4, 3))


def test_closures_lambdas_and_class_cells():
    module = make_class(7.0)()
    (view,) = record(module, X).named("view")
    patch_forward(module, {view: SitePatch(after=double)})
    assert torch.equal(module(X), 2 * X.view(2, 4, 3) + 7.0 + 0.5)


class Private(nn.Module):
    def __init__(self):
        super().__init__()
        self.__n = 4

    def __pick(self, x):
        return x.view(2, self.__n, -1)

    def forward(self, x):
        return self.__pick(x)


def test_private_names():
    module = Private()
    (view,) = record(module, X).named("view")
    patch_forward(module, {view: SitePatch(ints={(2,): 3})})
    assert torch.equal(module(X), X.view(2, 3, 4))


class Loop(nn.Module):
    def forward(self, x):
        for factor in (2, 3):
            x = x.mul(factor)
        return x


def test_a_site_in_a_loop():
    module = Loop()
    sites = record(module, X).named("mul")
    with pytest.raises(PatchError, match="one call site needs two patches.*args.1. = 3"):
        patch_forward(module, [(sites[0], SitePatch(ints={(1,): 3})), (sites[1], SitePatch(ints={(1,): 4}))])
    assert torch.equal(module(X), 2 * X * 3)
    patch_forward(module, [(s, SitePatch(ints={(1,): 3})) for s in sites])
    assert torch.equal(module(X), 3 * X * 3)


# --- instances ----------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x):
        return self.weight * x.view(2, 4, 3)


def test_two_instances_of_a_class_with_different_patches():
    one, two, plain = Scaled(1.5), Scaled(2.5), Scaled(3.5)
    (view,) = record(one, X).named("view")
    patch_forward(one, {view: SitePatch(ints={(2,): 3, (3,): 4})})
    patch_forward(two, {view: SitePatch(ints={(2,): 2, (3,): 6})})
    assert torch.equal(one(X), 1.5 * X.view(2, 3, 4))
    assert torch.equal(two(X), 2.5 * X.view(2, 2, 6))
    assert torch.equal(plain(X), 3.5 * X.view(2, 4, 3))


def test_a_deep_copy_is_patched_and_bound_to_itself():
    module = nn.Sequential(Scaled(1.5))
    (view,) = record(module[0], X).named("view")
    patch_forward(module[0], {view: SitePatch(ints={(2,): 3, (3,): 4})})
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin[0].weight.fill_(10.0)
    assert torch.equal(twin(X), 10.0 * X.view(2, 3, 4))
    assert torch.equal(module(X), 1.5 * X.view(2, 3, 4))
    assert patched_source(twin) == patched_source(module) != ""


def test_pickling_a_patched_module_says_why_not():
    module = Scaled(1.5)
    (view,) = record(module, X).named("view")
    patch_forward(module, {view: SitePatch()})
    with pytest.raises(PatchError, match="state_dict"):
        pickle.dumps(module)


def test_a_second_patch_and_a_foreign_site_are_refused():
    module = Scaled(1.5)
    (view,) = record(module, X).named("view")
    with pytest.raises(PatchError, match="not the forward that was recorded"):
        patch_forward(Base(), {view: SitePatch()})
    patch_forward(module, {view: SitePatch()})
    with pytest.raises(PatchError, match="one call"):
        patch_forward(module, {view: SitePatch()})


def test_no_source_is_an_error():
    namespace = {"nn": nn}
    exec("class Hidden(nn.Module):\n    def forward(self, x):\n        return x.view(2, 4, 3)", namespace)
    module = namespace["Hidden"]()
    (view,) = record(module, X).named("view")
    with pytest.raises(PatchError, match="m: no source for forward"):
        patch_forward(module, {view: SitePatch()})


class Iterates(nn.Module):
    def forward(self, x):
        a, b = x
        return a + b


def test_unpacking_is_refused_where_it_stands():
    module = Iterates()
    (site,) = record(module, X).named("__iter__") or record(module, X).named("unbind")
    with pytest.raises(PatchError, match=r"test_patch.py:\d+: the operation \(UNPACK_SEQUENCE\)"):
        patch_forward(module, {site: SitePatch()})


def test_a_missing_argument_is_an_error_at_run_time():
    module = Scaled(1.5)
    (view,) = record(module, X).named("view")
    patch_forward(module, {view: SitePatch(ints={(7,): 3})})
    with pytest.raises(PatchError, match=r"view\(...\) is called without args\[7\]"):
        module(X)


def test_tracebacks_point_at_the_models_own_line():
    module = Scaled(1.5)
    (view,) = record(module, X).named("view")
    patch_forward(module, {view: SitePatch()})
    try:
        module(X[:, :5])
    except RuntimeError as error:
        lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
    assert "return self.weight * x.view(2, 4, 3)" in lines


def test_the_dump_shows_changed_lines_only():
    module = Helped()
    first, _, third, _ = record(module, X).named("view")
    patch_forward(module, {first: SitePatch(ints={(2,): 2}), third: SitePatch(after=double)})
    lines = patched_source(module).splitlines()
    removed = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    assert sorted(removed) == [
        "first = self._shape(x)",
        "return heads_of(x, n) + 1",
        "return x.view(2, 4, 3)",
        "return x.view(x.shape[0], n, -1)",
        "third = indirect(x, 4)",
    ]
    notes = " ".join(line for line in lines if line.startswith("#"))
    assert "args[2] = 2" in notes and "result through double" in notes and "the patched _shape" in notes
    assert patched_source(Helped()) == ""


# --- real models --------------------------------------------------------------------------------------------


REFUSED = ("is not one expression", "several targets", "not an operation on tensors")


@pytest.mark.parametrize("name", ["bloom", "codegen", "nanogpt", "llama_gqa", "t5", "gpt2", "torch_encoder"])
def test_every_site_of_a_real_models_modules_patched_trivially(name):
    model, inputs = MODELS[name]()
    patched = 0
    with torch.no_grad():
        before = model(**inputs)
        for module in list(model.modules()):
            if type(module).__module__ == "torch.nn.modules.linear":
                continue
            sites = {site for _, site, _ in record(module, run=lambda: model(**inputs)).found}
            sites = {s for s in sites if s.frames and not in_autograd_function(s)}
            while sites:
                try:
                    patch_forward(module, dict.fromkeys(sites, SitePatch()))
                    patched += len(sites)
                    break
                except PatchError as error:
                    assert any(reason in str(error) for reason in REFUSED), error
                    sites = {s for s in sites if f":{s.frames[-1].lineno}: " not in str(error)}
        after = model(**inputs)
    first = before if isinstance(before, torch.Tensor) else before[0]
    again = after if isinstance(after, torch.Tensor) else after[0]
    assert torch.equal(first, again)
    assert patched > 20 and patched_source(model).count("_autotp_0") > 2


def in_autograd_function(site):
    """Its forward is called from C++: a patched copy cannot be put in its place."""
    return any(f.code.co_varnames[:1] == ("ctx",) for f in site.frames)


@pytest.mark.parametrize("which", ["view", "__getitem__", "matmul"])
def test_torch_compile_takes_a_patched_forward_in_one_graph(which):
    module = Kinds()
    patch_forward(module, {site: SitePatch(after=double) for site in record(module, X).named(which)[:2]})
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    expected = module(X)
    assert all(torch.equal(value, expected[key]) for key, value in compiled(X).items())


def test_torch_compile_follows_patched_functions_and_methods():
    module = Helped()
    patch_forward(module, {site: SitePatch(after=double) for site in record(module, X).named("view")})
    torch._dynamo.reset()
    expected = module(X)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(X), expected)


@pytest.mark.parametrize("name", ["bloom", "llama_gqa"])
def test_patched_models_generate_the_same_tokens(name):
    model, inputs = MODELS[name]()
    ids = inputs["input_ids"]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    for path, module in model.named_modules():
        if path.endswith(("attn", "attention")):
            sites = record(module, run=lambda: model(**inputs))
            patch_forward(module, {s: SitePatch() for s in sites.named("view") + sites.named("reshape")})
    assert patched_source(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
