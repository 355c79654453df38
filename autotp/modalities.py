"""What a model takes besides its main input: images, sounds, an encoder's states, entities.

Weights that no example input reaches stay whole. So arguments that forwards commonly have are offered in the
forms they commonly take, and what a recording shows to work is used. All on fake tensors: nothing is
computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import AutotpError
from .nested import tensors_in

if TYPE_CHECKING:
    from .captured import CapturedGraph
    from .inputs import Maker

Arguments = dict[str, Any]  # by name; None: to be left out
MAIN = {"image": "pixel_values", "audio": "input_features", "video": "pixel_values_videos"}
_PARTS = {  # words in the names of the configs that say what a kind of input looks like
    "image": ("vision", "visual", "image"),
    "video": ("vision", "visual", "video"),
    "audio": ("audio", "speech", "sound", "encoder"),
}
_TYPES = {"image": 1, "video": 2, "audio": 3}  # what `mm_token_type_ids` calls them
_FEW = 8  # so many states of an encoder, frames, …, where any number will do


def with_modalities(model: nn.Module, inputs: Arguments, make: Maker) -> Arguments:
    """`inputs` with token ids, with the images and sounds besides that the ids have places for: where the
    model says which token marks a place, and has a method that encodes them."""
    offers = Offers(model, inputs, make)
    for kind in MAIN:
        if kind == "video" and "pixel_values" in offers.takes:
            continue  # the same encoder
        for given in offers.forms(kind) if offers.has_places(kind, inputs) else ():
            placed = offers.placed(kind, inputs, given)
            if placed is not None:
                inputs = placed
                break
    return inputs


def better_inputs(model: nn.Module, inputs: Arguments, make: Maker, reached: int) -> Arguments:
    """Inputs that reach more than `reached` elements of the weights (-1: the model can't be recorded with
    `inputs`); `inputs` themselves if there are none."""
    offers = Offers(model, inputs, make)
    groups = [offers.repairs(inputs)] if reached < 0 else []
    for group in (*groups, *offers.extras(inputs)):
        for given in group:
            trial = {k: v for k, v in {**inputs, **given}.items() if v is not None}
            now = elements_reached(model, trial)
            if now > reached:
                inputs, reached = trial, now
                break
    return inputs


def elements_reached(model: nn.Module, inputs: Arguments) -> int:
    """How many elements of weights a run with these inputs uses; -1 where it can't be recorded."""
    from .capture import record  # which makes its inputs by this module

    try:
        return elements_used(record(model, inputs))
    except AutotpError:
        return -1


def elements_used(captured: CapturedGraph) -> int:
    """How many elements of weights were used in the recorded run."""
    model = captured.skeleton
    held = dict(model.named_parameters(remove_duplicate=False))
    used: dict[int, nn.Parameter] = {}
    for node in captured.graph.nodes:
        if node.op == "call_module":
            used.update((id(p), p) for p in model.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr" and str(node.target) in held:
            used[id(held[str(node.target)])] = held[str(node.target)]
    return sum(p.numel() for p in used.values())


def arguments_left_out(captured: CapturedGraph) -> list[str]:
    """The tensors that the model's forward takes and that were not among the recorded run's inputs; but for
    labels, and other ways to say what was given: positions, embeddings."""
    takes = inspect.signature(captured.skeleton.forward).parameters
    usual = ("labels", "_embeds", "positions", "position_ids", "attention_mask", "head_mask")
    types = {n: str(p.annotation) for n, p in takes.items() if not n.endswith(usual)}
    return [n for n, t in types.items() if "Tensor" in t and "int" not in t and n not in captured.inputs]


def text_alone(captured: CapturedGraph) -> Arguments | None:
    """The recorded run's inputs without images, sounds and the like that came beside token ids and that the
    forward can do without; None where there are none."""
    takes = inspect.signature(captured.skeleton.forward).parameters
    given = captured.inputs
    text = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")  # and a decoder's
    optional = [n for n in given if n in takes and takes[n].default is None and tensors_in(given[n])]
    beside = [n for n in optional if n.removeprefix("decoder_") not in text]
    if "input_ids" not in given or not beside:
        return None
    return {n: v for n, v in given.items() if n not in beside}


class _Encoder(nn.Module):
    """A method of a model that encodes images or sounds, as a module of its own."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, **given: Any) -> Any:
        features = getattr(self.model, self.method)(**given)
        return getattr(features, "pooler_output", features)


class Offers:
    """The arguments that one model may take, in the forms they may have."""

    def __init__(self, model: nn.Module, inputs: Arguments, make: Maker) -> None:
        self.model, self.make = model, make
        self.takes: Mapping[str, Any] = inspect.signature(model.forward).parameters
        self.batch = next((t.shape[0] for _, t in tensors_in(inputs)), make.batch)
        self.configs = list(_configs("", make.config))

    # --- settings ---

    def setting(self, kind: str, *names: str, default: Any = None) -> Any:
        """The first of these settings that a config has: those for this kind of input first."""
        return next(iter(self.settings(kind, *names)), default)

    def settings(self, kind: str, *names: str) -> list[Any]:
        def apart(item: tuple[str, Any]) -> bool:
            return not any(word in item[0] for word in _PARTS.get(kind, ()))

        found = [_read(config, name) for _, config in sorted(self.configs, key=apart) for name in names]
        return [value for value in found if value is not None]

    def token(self, kind: str) -> int | None:
        found = self.settings("", f"{kind}_token_id", f"{kind}_token_index")
        return next((value for value in found if isinstance(value, int)), None)

    # --- images and sounds with places among the tokens ---

    def has_places(self, kind: str, inputs: Arguments) -> bool:
        """Whether ids mark where encoded inputs of this kind go."""
        wanted = MAIN[kind] in self.takes and MAIN[kind] not in inputs and "input_ids" in inputs
        return wanted and self.token(kind) is not None and self._encoder(kind) is not None

    def _encoder(self, kind: str) -> _Encoder | None:
        name = f"get_{kind}_features"
        owner = next((m for m in self.model.modules() if callable(getattr(m, name, None))), None)
        return None if owner is None else _Encoder(owner, name)

    def placed(self, kind: str, inputs: Arguments, given: Arguments) -> Arguments | None:
        """`inputs` and `given`, with a place in the ids for each feature that is made of it; None where it
        is not encoded in this form."""
        token, encoder = self.token(kind), self._encoder(kind)
        if token is None or encoder is None:
            return None
        ids = self.unmarked(inputs["input_ids"])
        count = self._count(encoder, {"input_ids": ids, **given})
        if not count:
            return None
        marks = torch.full((self.batch, count), token)
        return self.aligned({**inputs, **given, "input_ids": torch.cat([ids[:, :1], marks, ids[:, 1:]], 1)})

    def _count(self, encoder: _Encoder, given: Arguments) -> int | None:
        """How many features an image or sound is encoded as; None where it can't be, in this form."""
        from .capture import record

        takes = inspect.signature(getattr(encoder.model, encoder.method)).parameters
        names = [n for n in given if n in takes or ("kwargs" in takes and n != "input_ids")]
        try:
            output = record(encoder, {n: given[n] for n in names}).output
        except AutotpError:
            return None
        parts = output if isinstance(output, (tuple, list)) else [output]
        return sum(part.meta["val"].shape[:-1].numel() for part in parts) // self.batch

    def unmarked(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids with others in place of those that mark something."""
        marks = torch.tensor([t for kind in MAIN if (t := self.token(kind)) is not None])
        high = int(ids.max())
        free = next((i for i in range(high, 0, -1) if i not in marks.tolist()), high)
        return torch.where(torch.isin(ids, marks), free, ids)

    def aligned(self, inputs: Arguments) -> Arguments:
        """The inputs with what goes token by token: which kind each is."""
        ids = inputs["input_ids"]
        kinds = torch.zeros_like(ids)
        for kind, number in _TYPES.items():
            token = self.token(kind)
            kinds = kinds if token is None else torch.where(ids == token, number, kinds)
        names = ["mm_token_type_ids"] if "mm_token_type_ids" in self.takes else []
        masks = {n: torch.ones_like(ids) for n in ("attention_mask",) if n in inputs}
        return {**inputs, **masks, **dict.fromkeys(names, kinds)}

    # --- forms ---

    def forms(self, kind: str) -> Iterator[Arguments]:
        return {"image": self._images, "video": self._videos, "audio": self._sounds}[kind]()

    def _images(self) -> Iterator[Arguments]:
        takes, make = self.takes, self.make
        channels = self.setting("image", "num_channels", "in_channels", "in_chans", default=3)
        high, wide = pair(self.setting("image", "image_size", default=32))
        patch, _ = pair(self.setting("image", "patch_size", default=16))
        merged = self.setting("image", "spatial_merge_size", "merge_size", default=1)
        rows, columns = 2 * merged, 3 * merged
        grid = torch.tensor([[1, rows, columns]] * self.batch)
        frames = self.setting("image", "temporal_patch_size", default=1)
        width = channels * patch * patch
        if "image_grid_thw" in takes:
            for each in dict.fromkeys((frames * width, width)):
                pixels = make.floats(rows * columns, each).flatten(0, 1)  # a row for each patch
                yield {"pixel_values": pixels, "image_grid_thw": grid}
        if "spatial_shapes" in takes:
            pixels, mask = make.floats(rows * columns, width), torch.ones(self.batch, rows * columns)
            shapes = {"spatial_shapes": grid[:, 1:].clone()}
            yield {"pixel_values": pixels, "pixel_attention_mask": mask.long(), **shapes}
        plain = {"pixel_values": make.floats(channels, high, wide)}
        if "high_res_pixel_values" in takes:
            finer = next((_read(c, "image_size") for name, c in self.configs if "high_res" in name), None)
            plain["high_res_pixel_values"] = make.floats(channels, *pair(finer or (high, wide)))
        single = {**plain, "pixel_values": plain["pixel_values"][:, None]}  # crops
        whole = torch.ones(self.batch, high, wide, dtype=torch.bool)
        masks = [n for n in ("pixel_mask", "pixel_attention_mask") if n in takes]
        if masks:
            yield {**plain, **dict.fromkeys(masks, whole)}
            yield {**single, **dict.fromkeys(masks, whole[:, None])}
        yield plain
        yield single
        if "image_sizes" in takes:
            sizes = torch.tensor([[high, wide]] * self.batch)
            yield {**plain, "image_sizes": sizes}
            yield {**single, "image_sizes": sizes}

    def _videos(self) -> Iterator[Arguments]:
        yield {"pixel_values_videos": self.make.pixel_values_videos()}

    def _sounds(self) -> Iterator[Arguments]:
        names = ("num_mel_bins", "feature_projection_input_dim", "input_dim", "feature_size", "input_size",
                 "input_feat_per_channel", "d_input", "n_mels")  # fmt: skip
        widths = dict.fromkeys(v for v in self.settings("audio", *names) if isinstance(v, int))
        longest = self.settings("audio", "max_source_positions", "n_window")  # each of two frames, mostly
        lengths = dict.fromkeys(2 * v for v in longest if isinstance(v, int))
        masks = [
            n for n in ("input_features_mask", "feature_attention_mask", "padding_mask") if n in self.takes
        ]
        for frames in (*lengths, 64):
            mask = torch.ones(self.batch, frames, dtype=torch.long)
            for width in widths or {80: None}:
                for shape in ((width, frames), (frames, width)):
                    features = {"input_features": self.make.floats(*shape)}
                    yield {**features, **dict.fromkeys(masks, mask)}
                    if masks:
                        yield features

    # --- further arguments ---

    def repairs(self, inputs: Arguments) -> Iterator[Arguments]:
        """Other forms of what is in `inputs`, of which some a model is not recorded with."""
        text = [n for n in ("input_ids", "decoder_input_ids", "attention_mask") if n in inputs]
        others = [n for n, v in inputs.items() if isinstance(v, torch.Tensor) and n not in text]
        ids, targets = inputs.get("input_ids"), inputs.get("decoder_input_ids")
        for kind, name in MAIN.items():
            if name in inputs and ids is not None and self.token(kind) is not None:
                alone = {n: inputs[n] for n in inputs if n not in others}
                placed = (self.placed(kind, alone, form) for form in self.forms(kind))
                yield from ({**dict.fromkeys(others), **form} for form in placed if form is not None)
        if ids is not None and others:
            yield dict.fromkeys(others)  # the text alone
        if ids is not None and "attention_mask" in self.takes and "attention_mask" not in inputs:
            yield {"attention_mask": torch.ones_like(ids)}
        books = next(iter(self.settings("", "num_codebooks", "num_quantizers")), None)
        if books is None and targets is not None:
            books = next((_read(c, "num_channels") for path, c in self.configs if "decoder" in path), None)
        if isinstance(books, int) and targets is not None:
            yield {"decoder_input_ids": targets[..., None].repeat(1, 1, books)}
        elif isinstance(books, int) and ids is not None:
            yield {"input_ids": ids.repeat(books, 1)}
            for each in (books, books + 1):  # the sounds' alone, or the text's as well
                yield {"input_ids": ids[..., None].repeat(1, 1, each)}
        if ids is not None and targets is not None:
            end = self.setting("", "eos_token_id")
            if isinstance(end, int):  # one of the model's own making, and a mark where the text ends
                last = torch.cat([ids[:, :-1], torch.full_like(ids[:, :1], end)], 1)
                yield {"input_ids": last, "decoder_input_ids": None}
        for kind, name in MAIN.items():
            if name in inputs:
                yield from self.forms(kind)
        if "input_features" in inputs and "input_values" in self.takes:
            yield {"input_features": None, "input_values": self.make.input_values()}

    def extras(self, inputs: Arguments) -> Iterator[Iterator[Arguments]]:
        """Groups of further arguments, each in its forms."""
        own = bool(getattr(self.make.config, "is_encoder_decoder", False))
        for kind, name in MAIN.items():
            if name in self.takes and name not in inputs and not self.has_places(kind, inputs):
                yield self.forms(kind)
        if not own and {"encoder_hidden_states", "encoder_outputs"} & set(self.takes):
            yield self._states()
        ids = inputs.get("input_ids")
        if ids is None or ids.ndim != 2:
            return
        yield self._by_token(ids)
        for name in self.takes:
            if name.endswith("_input_ids") and name not in ("decoder_input_ids", *inputs):
                masks = [m for m in (name.replace("input_ids", "attention_mask"),) if m in self.takes]
                yield iter(
                    [{name: self.make.ids(_FEW), **dict.fromkeys(masks, torch.ones(self.batch, _FEW).long())}]
                )

    def _states(self) -> Iterator[Arguments]:
        names = ("cross_attention_hidden_size", "encoder_hidden_size", "hidden_size", "d_model", "n_embd")
        for width in dict.fromkeys(v for v in self.settings("", *names) if isinstance(v, int)):
            states = self.make.floats(_FEW, width)
            if "encoder_hidden_states" in self.takes:
                yield {"encoder_hidden_states": states}
            else:
                yield {"encoder_outputs": (states,)}

    def _by_token(self, ids: torch.Tensor) -> Iterator[Arguments]:
        """Entities, boxes and the like, that belong to tokens."""
        batch, length = ids.shape
        if "entity_ids" in self.takes:
            places = torch.arange(length).repeat(batch, 3, 1)
            yield {"entity_ids": torch.full((batch, 3), 1), "entity_position_ids": places}
        if "global_attention_mask" in self.takes:
            yield {"global_attention_mask": torch.eye(1, length).long().repeat(batch, 1)}
        if "bbox" in self.takes:
            yield {"bbox": torch.arange(4).repeat(batch, length, 1)}
        if {"visual_feats", "visual_pos"} <= set(self.takes):
            widths = [self.setting("", f"{n}_dim", default=4) for n in ("visual_feat", "visual_pos")]
            yield dict(
                zip(("visual_feats", "visual_pos"), (self.make.floats(_FEW, w) for w in widths), strict=True)
            )


def _configs(path: str, config: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """A config and those nested in it, with the names that lead there."""
    yield path, config
    for name, value in vars(config).items():
        if depth and hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor, nn.Module)):
            if not callable(value) and type(value).__module__ != "torch":
                yield from _configs(f"{path}.{name}", value, depth - 1)


def _read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # some configs refuse to say what differs from layer to layer
        return None


def pair(size: Any) -> tuple[int, int]:
    """(height, width) of a size that is one number or both."""
    if isinstance(size, Mapping):
        size = [size["height"], size["width"]]
    several = size if isinstance(size, (tuple, list)) else [size]
    height, width = several if len(several) == 2 else several[:1] * 2  # of one stage for each: the first
    return int(height), int(width)
