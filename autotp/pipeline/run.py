"""Running a model that is cut into stages: every rank runs the model's own Python, and its own stages' units.

Units of other stages are stubs (`stub.py`). The value that crosses a cut is received by the stub of the unit
that made it, which gives it on in place of an `Absent`: code after it has the values, code before it has not.

*Inference* and generation: any module may be called, also a part (an encoder): the outermost call is the
*entry*. What a stage makes for later ones is sent as soon as it is there. When the entry returns, every
tensor of its output goes to the ranks that lack it.

*Training* runs one stage at a time on one micro-batch, with what it receives given beforehand:

    pipeline = model.autotp.pipeline
    made = pipeline.run_stage(model, stage, received, args, kwargs)

received, made: by `Key` (path, number, leaf) of the crossings of the cut before and after the stage. Autograd
runs through both. The run ends when the stage's last unit has returned; the last stage's goes to the end, and
`run_stage` gives the model's own output instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm
from ..errors import AbsentError, AutotpError, RankError
from ..nested import map_tensors
from .absent import Absent, Home, Origin, is_missing
from .channel import Channel, StageError
from .stages import Stages
from .stub import Forms, Stub

Key = tuple[str, int, int]  # a unit call's path and number, and which tensor of its output


@dataclass
class Run:
    """One run of the model's Python. calls: unit calls so far, as (path, number). values: by key, the
    crossing values that are here. stage: in training, the one that runs. what: for errors (a micro-batch).
    shapes: no unit is run, only shapes are found."""

    stage: int | None = None
    values: dict[Key, Tensor] = field(default_factory=dict)
    what: str = ""
    shapes: bool = False
    calls: list[tuple[str, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Left(BaseException):
    """A training stage's last unit has returned (past any `except Exception` of the model)."""


@dataclass(frozen=True)
class Hop:
    """A rank's part in handing on one output of a unit call. leaf: which. source: the rank that sends it
    here, or None where it is made. to: the rank it goes on to."""

    leaf: int
    source: int | None
    to: int | None


def hops(stages: Stages, rank: int, size: int) -> dict[tuple[str, int], list[Hop]]:
    """By unit call, what `rank` of `size` receives and sends. Stage s is run by rank s % size; a value goes
    from stage to stage in their order, once to each rank."""
    chains: dict[Key, list[int]] = {}
    for cut, crossings in enumerate(stages.crossings):
        for c in crossings:
            first = stages.stage_of[c.path, c.number]
            chain = chains.setdefault((c.path, c.number, c.leaf), [first % size])
            if (cut + 1) % size not in chain:
                chain.append((cut + 1) % size)
    found: dict[tuple[str, int], list[Hop]] = {}
    for (path, number, leaf), chain in sorted(chains.items()):
        if rank in chain:
            at = chain.index(rank)
            source = chain[at - 1] if at else None
            to = chain[at + 1] if at + 1 < len(chain) else None
            if source is not None or to is not None:
                found.setdefault((path, number), []).append(Hop(leaf, source, to))
    return found


class Pipeline:
    """One rank's view of a model in stages. channel: to the ranks of the other stages; None where nobody
    runs it (a single process). place: this rank in words, for errors."""

    def __init__(
        self, stages: Stages, rank: int, size: int, channel: Channel | None, device: torch.device, place: str
    ) -> None:
        self.stages, self.rank, self.size, self.channel, self.place = stages, rank, size, channel, place
        self.mine = tuple(range(rank, stages.count, size))
        self.home = Home(device, self.mine)
        self.run: Run | None = None
        self.forms = Forms()
        self.runner: Any = None                  # of the last training step: `schedule.Runner`
        self.failed = ""                         # what a training step failed of
        self.trained: dict[tuple[bool, ...], Comm] = {}   # by which ranks have gradients: this one's likes
        self.trains: Callable[[], bool] = lambda: True   # whether parameters want gradients
        self.lies: Callable[[], torch.device] = lambda: device     # where the tensors are now
        self._hops = hops(stages, rank, size)
        self._crossing: dict[tuple[str, int], list[tuple[int, Key]]] = {}   # leaf of a call -> what it is
        for c in dict.fromkeys(c for crossings in stages.crossings for c in crossings):
            key = (c.path, c.number, c.leaf)
            for path, number, leaf in (key, *c.also):
                entry = (leaf, key)
                if entry not in self._crossing.setdefault((path, number), []):
                    self._crossing[path, number].append(entry)
        self._last = {(c.path, c.number): c.stage for c in stages.last_calls}
        self._agreed: dict[Any, tuple[tuple[bool, ...], list[tuple[int, int, list[int]]]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        return self                              # a copy of the model talks to the same ranks

    def holders(self, name: str) -> tuple[int, ...]:
        """The ranks that hold the parameter or buffer `name`, in order."""
        stages = self.stages.params.get(name, tuple(range(self.stages.count)))
        return tuple(sorted({stage % self.size for stage in stages}))

    def origin(self, path: str, stage: int) -> Origin:
        return Origin(path, stage, self.home)

    # ---------------------------------------------------------------- units
    def call(self, unit: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a unit."""
        run = self.run
        assert run is not None
        call = (unit.path, run.counts[unit.path])
        stage = self._stage(call)
        if run.stage is not None and stage > run.stage:
            raise Left
        run.counts[unit.path] += 1
        run.calls.append(call)
        if run.shapes:
            result = unit.stub.run(args, kwargs, self.origin(unit.path, stage))
        elif stage in self.mine if run.stage is None else stage == run.stage:
            self._refuse_missing(unit.path, stage, (args, kwargs))
            result = unit.forward(*args, **kwargs)
        else:
            result = unit.stub.run(args, kwargs, self.origin(unit.path, stage))
        if call in self._crossing:
            result = self._cross(run, call, result)
        if run.shapes and self._last.get(call) == self.stages.count - 2:
            raise Left
        if run.stage is not None and self._last.get(call) == run.stage < self.stages.count - 1:
            raise Left
        return result

    def _stage(self, call: tuple[str, int]) -> int:
        found = self.stages.stage_of.get(call)
        if found is not None:
            return found
        owners = self.stages.owners(call[0])
        if len(owners) > 1:
            raise AutotpError(
                f"{call[0]} is called more often ({call[1] + 1} times) than when the model was captured, and "
                f"its calls are on several stages ({', '.join(map(str, owners))}): which of them runs this "
                "one is not known. Give example_inputs like the real ones, or cut the model elsewhere."
            ).at(call[0])
        return owners[0]

    def _refuse_missing(self, path: str, stage: int, arguments: Any) -> None:
        for tensor in _tensors(arguments):
            if isinstance(tensor, Absent) or tensor.is_meta:
                made = f"It was {tensor.origin}." if isinstance(tensor, Absent) else "It is on meta."
                raise AbsentError(
                    f"{path}, on stage {stage}, is given a tensor of shape {list(tensor.shape)} that is not "
                    f"here. {made} The model took another way than the captured one: give example_inputs "
                    "like the real ones, or cut it elsewhere (`stages=`)."
                ).at(path)

    def _cross(self, run: Run, call: tuple[str, int], result: Any) -> Any:
        """Send and receive what crosses cuts of this call's output."""
        leaves: list[Tensor] = []
        map_tensors(result, lambda t: leaves.append(t) or t)  # type: ignore[func-returns-value]
        new = dict(enumerate(leaves))
        if run.stage is None and not run.shapes:
            for hop in self._hops.get(call, ()):
                assert self.channel is not None
                if hop.source is not None:
                    new[hop.leaf] = self.channel.receive(leaves[hop.leaf], self.home.device, hop.source)
                if hop.to is not None:
                    self.channel.send(new[hop.leaf], hop.to)
        for leaf, key in self._crossing[call]:
            if key in run.values:
                new[leaf] = run.values[key]
            elif run.shapes or not isinstance(new[leaf], Absent):
                run.values[key] = new[leaf]
        if all(new[i] is leaf for i, leaf in enumerate(leaves)):
            return result
        order = iter(range(len(leaves)))
        return map_tensors(result, lambda _: new[next(order)])

    # ---------------------------------------------------------------- training
    def run_stage(
        self,
        model: Callable[..., Any],
        stage: int,
        received: Mapping[Key, Tensor],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        what: str = "",
    ) -> Any:
        """Run one stage of this rank on the arguments of the whole model; see the head of this file.

        what: the micro-batch in words, for errors. Gives the values that cross the cut after the stage by
        key, of the last stage what the model gives.
        """
        if stage not in self.mine:
            raise AutotpError(f"stage {stage} is not on {self.place}, which has {self.mine}")
        self.run = run = Run(stage, dict(received), what)
        try:
            result = model(*args, **(kwargs or {}))
        except Left:
            keys = [(c.path, c.number, c.leaf) for c in self.stages.crossings[stage]]
            return {key: run.values[key] for key in keys if key in run.values}
        except AutotpError:
            raise
        except Exception as error:
            raise RankError(f"{self._where(run)}: {type(error).__name__}: {error}") from error
        finally:
            self.run = None
        return result

    def shapes(self, model: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[Key, Tensor]:
        """By key, tensors with the shapes and dtypes that cross on these arguments; nothing is computed.

        Every unit runs as a stub, and the run ends with the last call before the last cut."""
        self.run = run = Run(shapes=True)
        buffers = [(b, b.clone()) for b in model.buffers() if not is_missing(b)]  # type: ignore[attr-defined]
        try:
            with torch.no_grad(), torch.random.fork_rng():
                model(**kwargs)
        except Left:
            pass
        finally:
            self.run = None
            for buffer, kept in buffers:
                buffer.copy_(kept)
        return run.values

    def _where(self, run: Run) -> str:
        """This rank, its stage, and how far it came."""
        stages = str(run.stage) if run.stage is not None else ", ".join(map(str, self.mine))
        last = f", at {run.calls[-1][0]}" if run.calls else ""
        return f"{self.place}, stage {stages}{', ' + run.what if run.what else ''}{last}"

    # ---------------------------------------------------------------- inference
    def enter(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The outermost call of a module of the model."""
        if torch.is_grad_enabled() and self.trains():
            raise AutotpError(
                f"this model is split into {self.stages.count} pipeline stages: gradients can't flow through "
                "one call of it. Train with autotp.train_step(model, batch, microbatches=…); for inference, "
                "call it under torch.no_grad()."
            )
        if self.channel is None:
            raise AutotpError(f"{self.place} has nobody to talk to")
        self.home.device = self.lies()
        self.run = run = Run()
        self.channel.begin()
        try:
            result = self._share(path, run, forward(*args, **kwargs))
            self.channel.end()
            return result
        except StageError as error:              # hand it on
            self.channel.fail(str(error))
            raise
        except RankError as error:               # a peer is gone: say where this rank waited for it
            text = f"{self._where(run)}: {error}"
            self.channel.fail(text)
            raise RankError(text) from error
        except BaseException as error:
            self.channel.fail(f"{self._where(run)} failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.run = None

    def _share(self, path: str, run: Run, result: Any) -> Any:
        """The output with every tensor on every rank. Who has what is found out once, then known."""
        assert self.channel is not None
        leaves: list[Tensor] = []
        map_tensors(result, lambda t: leaves.append(t) or t)  # type: ignore[func-returns-value]
        lacks = tuple(isinstance(t, Absent) or t.is_meta for t in leaves)
        known = (path, tuple(run.calls), len(leaves))
        if known not in self._agreed:
            self._agreed[known] = lacks, self._who_sends(known, self.channel.exchange((known, lacks)))
        expected, sends = self._agreed[known]
        if lacks != expected:
            raise RankError(f"{self.place}: the output of {path or 'the model'} has other tensors on this "
                            "rank than in an earlier call that ran the same units.")
        if not sends:
            return result
        for leaf, source, to in sends:
            if source == self.rank:
                for rank in to:
                    self.channel.send(leaves[leaf], rank)
            elif self.rank in to:
                leaves[leaf] = self.channel.receive(leaves[leaf], self.home.device, source)
        order = iter(leaves)
        return map_tensors(result, lambda _: next(order))

    def _who_sends(
        self, known: Any, told: Sequence[tuple[Any, tuple[bool, ...]]]
    ) -> list[tuple[int, int, list[int]]]:
        """By tensor of the output that some rank lacks: its index, the rank that sends it, and to whom."""
        for rank, (theirs, _) in enumerate(told):
            if theirs != known:
                raise RankError(
                    f"pp ranks {self.rank} and {rank} ran different calls: "
                    f"{_first_difference(known, theirs)}. Every rank must make the same calls with the same "
                    "inputs."
                )
        found = []
        for leaf in range(known[2]):
            have = [rank for rank, (_, lacks) in enumerate(told) if not lacks[leaf]]
            if not have:
                raise AbsentError(f"tensor {leaf} of the output of {known[0] or 'the model'} is on no rank.")
            to = [rank for rank in range(self.size) if rank not in have]
            if to:
                found.append((leaf, have[-1], to))
        return found


def _first_difference(one: Any, other: Any) -> str:
    for a, b in zip(one, other, strict=True):
        if a != b:
            if isinstance(a, tuple):
                return next((f"{x} and {y}" for x, y in zip(a, b, strict=False) if x != y),
                            f"{len(a)} and {len(b)} of them")
            return f"{a!r} and {b!r}"
    return "nothing"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


class UnitForward:
    """The forward of a unit, its own or a stub's, as the stage has it."""

    def __init__(self, path: str, forward: Callable[..., Any], pipeline: Pipeline) -> None:
        self.path, self.forward, self.pipeline = path, forward, pipeline
        self.stub = Stub(path, forward, pipeline.forms)
        self.__wrapped__ = forward               # what inspect.signature asks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline.run is None:
            run = self.pipeline
            return run.enter(self.path, lambda *a, **k: run.call(self, a, k), args, kwargs)
        return self.pipeline.call(self, args, kwargs)


class EntryForward:
    """The forward of a module around units: the entry, where it is called first."""

    def __init__(self, path: str, forward: Callable[..., Any], pipeline: Pipeline) -> None:
        self.path, self.forward, self.pipeline = path, forward, pipeline
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline.run is None:
            return self.pipeline.enter(self.path, self.forward, args, kwargs)
        return self.forward(*args, **kwargs)
