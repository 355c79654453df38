"""Generation with the rows of a batch in groups, so that a stage works on one while it waits for another.

Each group runs the model's own `generate`, in a thread, with a cache and a channel of its own. Only one
thread runs at a time: the others stand where they wait for another stage's message. Wherever a group comes to
such a place, it lets the next one run first. So what a rank does is the same from run to run, and the same on
its tensor-parallel peers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AutotpError
from .channel import Channel, channel
from .run import Pipeline

_MAY = frozenset(
    "max_new_tokens min_new_tokens max_length min_length eos_token_id pad_token_id do_sample use_cache "
    "cache_implementation num_beams repetition_penalty no_repeat_ngram_size num_return_sequences".split()
)
_SINGLE = {"do_sample": (None, False), "num_beams": (None, 1), "num_return_sequences": (None, 1)}


def generate(model: nn.Module, groups: int | None = None, **kwargs: Any) -> Tensor:
    """`model.generate(**kwargs)` of a model in stages, greedy, with the batch in `groups` groups (None: one
    for each stage's rank) that keep the stages busy in turn.

    The tokens are those of `model.generate` as long as the rows of a batch do not influence each other, which
    a router that shares places between tokens or a norm over the batch would break. Tensors of as many rows
    as the first are split. -> [batch, length]. Every rank calls it, with the same arguments.

    Raises AutotpError for what can't be split: sampling, beams, criteria, outputs other than tokens.
    """
    state: Any = getattr(model, "autotp", None)
    pipeline: Pipeline | None = getattr(state, "pipeline", None)
    if pipeline is None or pipeline.channel is None:
        raise AutotpError("autotp.generate is for a model in pipeline stages: parallelize(model, pp=2).")
    rows = next((len(v) for v in kwargs.values() if isinstance(v, Tensor) and v.dim()), 0)
    wanted = pipeline.size if groups is None else groups
    _refuse(model, kwargs)
    if not isinstance(wanted, int) or min(wanted, rows) < 1:
        raise AutotpError(f"groups={groups!r} of a batch of {rows} rows: give tensors by name, and 1 group "
                          "or more.")
    count = min(wanted, rows)
    sizes = [rows // count + (i < rows % count) for i in range(count)]
    shares = [
        {name: v.split(sizes)[i] if isinstance(v, Tensor) and v.dim() and len(v) == rows else v
         for name, v in kwargs.items()}
        for i in range(count)
    ]  # fmt: skip
    made: list[Channel] = pipeline.__dict__.setdefault("group_channels", [])
    while len(made) < count:
        made.append(channel(state.mesh.pp))
    turn = max(map(max, state.mesh.pp.exchange([line.turn for line in made])))
    for line in made:                            # a failure leaves ranks at different calls
        line.turn = turn
    turns = _Turns(pipeline, made[:count])
    with torch.random.fork_rng():
        parts = turns.run([_alone(model, share) for share in shares])
    return _joined(parts, _padding(model, kwargs))


def _refuse(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    config = getattr(model, "generation_config", None)
    odd = [k for k, v in kwargs.items() if k not in _MAY and v is not None and not isinstance(v, Tensor)]
    for name, plain in _SINGLE.items():
        if kwargs.get(name, getattr(config, name, None)) not in plain:
            odd.append(name)
    told = ("return_dict_in_generate", "max_time", "stop_strings")
    odd += [name for name in told if getattr(config, name, None) and name not in odd]
    if odd:
        raise AutotpError(f"autotp.generate takes no {', '.join(odd)}: it gives greedy tokens, of groups of "
                          "rows; model.generate does all else.")


def _alone(model: Any, share: dict[str, Any]) -> Callable[[], Tensor]:
    """One group's run, on a twin of the model: some keep their cache as an attribute."""
    twin: Any = object.__new__(type(model))
    twin.__dict__ = dict(vars(model))
    method = model.generate
    return lambda: method.__func__(twin, **share)


def _padding(model: Any, kwargs: Mapping[str, Any]) -> int:
    """What rows that have ended are filled up with, as `generate` does."""
    config = model.generation_config
    for name in ("pad_token_id", "eos_token_id"):
        value = kwargs.get(name, getattr(config, name, None))
        if value is not None:
            return int(value[0] if isinstance(value, (list, tuple)) else value)
    return 0


def _joined(parts: list[Tensor], padding: int) -> Tensor:
    longest = max(part.shape[1] for part in parts)
    pad = nn.functional.pad
    return torch.cat([pad(part, (0, longest - part.shape[1]), value=padding) for part in parts])


class _Turns:
    """Runs functions in threads of which one runs at a time. A group's turn ends where it waits for a
    message, or has returned."""

    def __init__(self, pipeline: Pipeline, channels: list[Channel]) -> None:
        self.pipeline, self.channels = pipeline, channels
        self.changed = threading.Condition()
        self.live = list(range(len(channels)))
        self.now = 0
        self.error: BaseException | None = None

    def run(self, functions: list[Callable[[], Tensor]]) -> list[Tensor]:
        results: list[Any] = [None] * len(functions)
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        before = self.pipeline.channel, self.pipeline.run

        def one(group: int) -> None:
            try:
                self._wait(group)
                self.pipeline.run, self.pipeline.channel = None, _InTurn(self.channels[group], self, group)
                with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    results[group] = functions[group]()
            except BaseException as error:
                self.error = self.error or error
            finally:
                self._leave(group)

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(functions))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self.pipeline.channel, self.pipeline.run = before
        if self.error is not None:
            raise self.error
        return results

    def give_way(self, group: int) -> None:
        """Let the others run until it is this group's turn again."""
        if len(self.live) == 1:
            return
        kept = self.pipeline.run, self.pipeline.channel
        with self.changed:
            self._next(group)
        self._wait(group)
        self.pipeline.run, self.pipeline.channel = kept

    def _wait(self, group: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.now == group or self.error is not None)
        if self.error is not None:
            raise AutotpError("another group of the batch failed") from self.error

    def _next(self, group: int) -> None:
        self.now = next((g for g in self.live if g > group), self.live[0])
        self.changed.notify_all()

    def _leave(self, group: int) -> None:
        with self.changed:
            self.live.remove(group)
            if self.live and self.now == group:
                self._next(group)
            self.changed.notify_all()


class _InTurn(Channel):
    """A group's channel: it gives way to the other groups before it waits for a message."""

    def __init__(self, channel: Channel, turns: _Turns, group: int) -> None:
        self.channel, self.turns, self.group = channel, turns, group
        self.rank, self.size, self.device = channel.rank, channel.size, channel.device

    def begin(self) -> None:
        self.channel.begin()

    def send(self, x: Tensor, to: int) -> None:
        self.channel.send(x, to)

    def receive(self, like: Tensor, device: torch.device, source: int) -> Tensor:
        self.turns.give_way(self.group)
        return self.channel.receive(like, device, source)

    def fail(self, text: str) -> None:
        self.channel.fail(text)

    def end(self) -> None:
        self.channel.end()
