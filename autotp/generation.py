"""The same random numbers, the same tokens and the same stop on every rank.

Each rank of a tensor-parallel model runs the model's own Python, `generate` included, on its own random
generator and its own clock. What they draw or decide there must agree, or one rank goes on to a collective
that another never joins:

* sampling: at the start of `generate` all ranks take the random state of rank 0;
* stopping: a criterion that looks at more than the tokens (the user's own, or the clock) is asked on every
  rank, and a stop on one is a stop on all: one small collective per token, only where there is such a
  criterion;
* dropout on replicated values: in training all ranks take rank 0's random state at each forward of the root;
* dropout on sharded values must differ by rank: `ParallelDropout`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autotp.comm import Comm
from autotp.errors import AutotpError
from autotp.same import agree

# --- random states ------------------------------------------------------------------------------------------


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _states(device: torch.device) -> list[Tensor]:
    """The random states a model on `device` draws from: the CPU's, and the device's own."""
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def _take_first_ranks_states(comm: Comm, device: torch.device) -> None:
    # a group of GPUs may have no backend for CPU tensors
    _set_states([comm.broadcast(state.to(device), 0).cpu() for state in _states(device)], device)


@contextlib.contextmanager
def rank_rng(comm: Comm, device: torch.device | None = None) -> Iterator[None]:
    """Random numbers inside differ by rank; after it the ranks agree again, if they agreed before.

    The ranks' seeds are drawn from the agreed random state, so a run is reproducible from its seed, and
    activation checkpointing, which restores that state, sees the same numbers again. Also usable as a
    decorator.
    device: where the numbers are drawn (None: the CPU).
    """
    device = device or torch.device("cpu")
    seed = int(torch.randint(2**62, ())) + comm.rank
    states = _states(device)
    try:
        torch.default_generator.manual_seed(seed)
        if len(states) > 1:
            torch.get_device_module(device).manual_seed(seed)
        yield
    finally:
        _set_states(states, device)


class ParallelDropout(nn.Dropout):
    """Dropout of a value that is sharded over the ranks: every rank drops other elements of its own."""

    comm: Comm

    @classmethod
    def swap(cls, module: nn.Module, comm: Comm) -> None:
        """Turn an `nn.Dropout` into this, in place. Raises AutotpError for any other module."""
        if type(module) is not nn.Dropout:
            raise AutotpError(
                f"{type(module).__name__} is not nn.Dropout; keep the module that uses it replicated"
            )
        module.__class__ = cls
        module.comm = comm  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape, this rank's part."""
        if not self.training or self.p == 0 or isinstance(input, FakeTensor):
            return super().forward(input)
        with rank_rng(self.comm, input.device):
            return super().forward(input)


class RegionRng:
    """Random numbers that differ by rank from the call of one module to the call of another, in training.

    Between a column-parallel and a row-parallel layer all values are sharded: dropout that is called there as
    a function must drop other elements on every rank.
    """

    def __init__(self, comm: Comm):
        self.comm = comm
        self.running: contextlib.AbstractContextManager[None] | None = None

    @classmethod
    def install(cls, first: nn.Module, last: nn.Module, comm: Comm) -> None:
        """From the call of `first` to that of `last`."""
        region = cls(comm)
        first.register_forward_pre_hook(region.start)
        last.register_forward_pre_hook(region.stop)

    def start(self, module: nn.Module, args: Any) -> None:
        if module.training and self.running is None and not any(isinstance(a, FakeTensor) for a in args):
            self.running = rank_rng(self.comm, _device(module))
            self.running.__enter__()

    def stop(self, module: nn.Module, args: Any) -> None:
        if self.running is not None:
            running, self.running = self.running, None
            running.__exit__(None, None, None)


def has_dropout(module: nn.Module) -> bool:
    """May this module drop anything in training? Told by its nn.Dropout children and the rates it keeps; one
    that keeps none may have its rate as a literal in its code."""
    rates = [v for k, v in vars(module).items() if "drop" in k and isinstance(v, float)]
    rates += [child.p for child in module.modules() if isinstance(child, nn.Dropout)]
    return not rates or any(rate > 0 for rate in rates)


def synchronise_rng(model: nn.Module, comm: Comm) -> RemovableHandle:
    """In training, all ranks take rank 0's random state at each forward of `model`.

    So dropout on replicated values agrees. Dropout called as a function cannot be seen from outside, so
    this happens in every training forward: one broadcast of a few kilobytes. Nothing happens in eval mode.
    Returns the handle of the hook.
    """

    def before_forward(module: nn.Module, args: Any) -> None:
        if module.training and not any(isinstance(p, FakeTensor) for p in module.parameters()):
            _take_first_ranks_states(comm, _device(module))

    return model.register_forward_pre_hook(before_forward)


# --- generate -----------------------------------------------------------------------------------------------


class _AnyRank:
    """Stopping criteria that may answer differently on each rank: done where any says so on any rank."""

    def __init__(self, criteria: Sequence[Callable[..., Any]], seconds: float | None, comm: Comm):
        self.criteria = criteria
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.comm = comm
        for criterion in criteria:  # what `generate` recognises an end-of-sequence criterion by
            if hasattr(criterion, "eos_token_id"):
                self.eos_token_id = criterion.eos_token_id

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """input_ids: [batch, length] -> [batch], bool."""
        done = torch.zeros(input_ids.shape[0], dtype=torch.int32, device=input_ids.device)
        for criterion in self.criteria:
            verdict = criterion(input_ids, scores, **kwargs)
            done |= torch.as_tensor(verdict, device=done.device).to(torch.int32)
        if self.deadline is not None and time.monotonic() > self.deadline:
            done.fill_(1)
        return self.comm.all_reduce(done, op="max").bool()


def _looks_at_tokens_only(criterion: Any) -> bool:
    """transformers' own criteria (but for the clock) answer the same on every rank; they stay as they are,
    because `generate` knows some of them by their class."""
    return type(criterion).__module__.startswith("transformers.") and not hasattr(criterion, "max_time")


def synchronise_generation(model: nn.Module, comm: Comm) -> None:
    """Make `model.generate` do the same on every rank, whatever their seeds and clocks.

    Nothing for a model without `generate`. Random numbers are those that rank 0 alone would draw; the other
    ranks' random states are as before afterwards. `stopping_criteria` and `max_time` stop all ranks as soon
    as they stop one. A `streamer` is called on each rank that was given one: give it to rank 0 only to
    print once. `model.generate` raises RankError on every rank, before generating, where the ranks'
    arguments differ.
    """
    method = getattr(model, "generate", None)
    if method is None:
        return
    original = getattr(method, "__func__", None)
    if original is None:
        raise AutotpError(
            f"{type(model).__name__}.generate is no method of the model; set it after parallelizing"
        )

    @functools.wraps(original)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _by_name(original, self, args, kwargs)
        config = kwargs.get("generation_config") or getattr(self, "generation_config", None)
        agree(
            comm,
            _description({**kwargs, **{f"argument {i}": a for i, a in enumerate(args)}, "config": config}),
        )
        device = _device(self)
        before = _states(device)
        _take_first_ranks_states(comm, device)
        try:
            return original(self, *args, **_with_agreed_stops(self, kwargs, comm))
        finally:
            if comm.rank != 0:
                _set_states(before, device)

    # a bound method: a deep copy of the model generates with the copy
    model.generate = types.MethodType(generate, model)  # type: ignore[assignment]


def _by_name(
    function: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments as keywords, where the method's signature names them."""
    signature = inspect.signature(function)
    if any(
        p.kind is not p.POSITIONAL_OR_KEYWORD for p in list(signature.parameters.values())[: len(args) + 1]
    ):
        return args, kwargs
    signature.bind(owner, *args, **kwargs)  # the usual TypeError, in the usual words
    return (), {**dict(zip(list(signature.parameters)[1:], args, strict=False)), **kwargs}


def _with_agreed_stops(model: nn.Module, kwargs: dict[str, Any], comm: Comm) -> dict[str, Any]:
    """The arguments with every criterion that may differ by rank put into one that all ranks share."""
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    limits = [kwargs.get("max_time"), *[getattr(config, "max_time", None) for config in configs]]
    seconds = next((limit for limit in limits if limit is not None), None)
    criteria = list(kwargs.get("stopping_criteria") or ())
    own = [c for c in criteria if not _looks_at_tokens_only(c)]
    if not own and seconds is None:
        return kwargs
    shared = [*[c for c in criteria if _looks_at_tokens_only(c)], _AnyRank(own, seconds, comm)]
    # the keyword wins over both configs
    return {**kwargs, "stopping_criteria": shared, **({} if seconds is None else {"max_time": None})}


def _description(arguments: Mapping[str, Any]) -> str:
    """The arguments of `generate`, one a line, in a form that is equal where they are."""

    def describe(value: Any) -> str:
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(data).hexdigest()[:12]
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}, contents {digest}"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if callable(getattr(value, "to_dict", None)):  # a generation config
            return str(sorted((str(k), describe(v)) for k, v in value.to_dict().items()))
        if isinstance(value, (list, tuple, dict)):
            leaves, _ = pytree.tree_flatten(value)
            return f"{len(value)} of [{', '.join(describe(leaf) for leaf in leaves if leaf is not value)}]"
        return type(value).__name__

    named = [(name, value) for name, value in arguments.items() if name != "streamer"]
    return "\n".join(f"{name}: {describe(value)}" for name, value in sorted(named))


def refuse_resize(model: nn.Module) -> None:
    """Make `model.resize_token_embeddings`, which would put whole weights for shards, an error."""
    if not hasattr(model, "resize_token_embeddings"):
        return

    def resize_token_embeddings(*args: Any, **kwargs: Any) -> Any:
        raise AutotpError(
            "resize_token_embeddings: this model is already split over ranks, and its vocabulary with it. "
            "Call it before autotp.parallelize, on the whole model."
        )

    model.resize_token_embeddings = resize_token_embeddings  # type: ignore[assignment]
