"""Example inputs for a model, from its forward's signature and its config.

Sizes are small, and differ from the model's own where they can: an axis of 12 that is the sequence should not
look like an axis of 12 heads. Values are valid (token ids below the vocabulary size), so the inputs also run
for real.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import CaptureError
from .modalities import better_inputs, elements_reached, pair, with_modalities

_BATCHES = (2, 3, 5, 7)
_LENGTHS = (12, 10, 14, 18, 22, 11, 13)
_TARGET_LENGTHS = (9, 7, 15, 6, 17)
_LONGEST = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
)  # settings that bound a sequence's length


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Inputs for one call `model(**inputs)`.

    Serves the interfaces in common use: token ids (with a decoder's), images, videos, audio features and
    waveforms, image with text; and modules with one tensor argument that begin with an `nn.Embedding` or an
    `nn.Linear`. Raises CaptureError, with the signature, for any other.
    """
    parameters = inspect.signature(model.forward).parameters
    make = Maker(model)
    inputs: dict[str, Any] = {}
    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in parameters and (main == "input_ids" or make.has_text):
        inputs["input_ids"] = make.ids(make.length)
    for name in ("pixel_values", "pixel_values_videos", "input_features", "input_values"):
        if name in parameters and (
            name == main or not inputs or (name == "pixel_values" and make.pairs_images)
        ):
            inputs[name] = getattr(make, name)()
    if "decoder_input_ids" in parameters and make.get("is_encoder_decoder", False):
        inputs["decoder_input_ids"] = make.ids(make.target_length)
    if not inputs:
        inputs = _single_tensor(model, parameters, make)
    needed = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in inputs
    }
    if "attention_mask" in needed and "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        needed.discard("attention_mask")
    if needed or not inputs:
        raise _unserved(model)
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs if make.config is None else with_modalities(model, inputs, make)


def improved(model: nn.Module, inputs: dict[str, Any], reached: int) -> dict[str, Any]:
    """Inputs of other forms, or with further arguments, that the model can be recorded with and that reach
    more than `reached` elements of its weights (-1: `inputs` can't be recorded); `inputs` if there are none.
    """
    make = Maker(model)
    return inputs if make.config is None else better_inputs(model, inputs, make, reached)


def best_inputs(model: nn.Module) -> dict[str, Any]:
    """`example_inputs`, improved where that is possible: what a plan is made on when none are given."""
    inputs = example_inputs(model)
    reached = elements_reached(model, inputs)
    everything = sum(p.numel() for p in model.parameters())
    return inputs if reached == everything else improved(model, inputs, reached)


def bind_inputs(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any] | torch.Tensor) -> dict[str, Any]:
    """Example inputs, given by name or as a tuple of positional arguments (or one tensor), by name.

    Raises CaptureError where they do not fit the signature of the model's forward.
    """
    signature = inspect.signature(model.forward)
    if not isinstance(inputs, (Mapping, list, tuple, torch.Tensor)):
        raise CaptureError(
            f"The example inputs are of type {type(inputs).__name__}: give a dict by argument name, or a "
            f"tuple in the order of {type(model).__name__}.forward{signature}."
        )
    if isinstance(inputs, Mapping):
        args: tuple[Any, ...] = ()
        kwargs = dict(inputs)
    else:
        args, kwargs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise CaptureError(
            f"The example inputs do not fit {type(model).__name__}.forward{signature}: {error}. Give a dict "
            "by argument name, or a tuple in this order."
        ) from None
    named: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise CaptureError(
                f"{type(model).__name__}.forward{signature} takes `{name}` by position only; inputs are "
                "passed by name. Wrap the model in a module whose forward names its arguments."
            )
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


class Maker:
    """Makes the single inputs, with sizes that suit one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config = getattr(model, "config", None)
        taken = {size for parameter in model.parameters() for size in parameter.shape}
        taken |= {
            value for module in model.modules() for value in vars(module).values() if type(value) is int
        }
        self.batch = _first_free(_BATCHES, taken)
        longest = min((n for n in self._settings(*_LONGEST) if n > 0), default=2048)
        self.length = _first_free([n for n in _LENGTHS if n <= longest] or [longest], taken | {self.batch})
        self.target_length = _first_free(_TARGET_LENGTHS, taken | {self.batch, self.length})
        self.dtype = next(
            (p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype()
        )
        # One stream of their own: making inputs must not move the caller's random numbers.
        self.generator = torch.Generator().manual_seed(0)

    def get(self, name: str, default: Any) -> Any:
        """A setting of the config, or of the first config nested in it that has it."""
        return next(iter(self._settings(name)), default)

    def _settings(self, *names: str) -> list[Any]:
        nested = [
            self.config,
            *(v for v in getattr(self.config, "__dict__", {}).values() if hasattr(v, "__dict__")),
        ]
        found = [getattr(config, name, None) for config in nested if config is not None for name in names]
        return [value for value in found if value is not None]

    @property
    def has_text(self) -> bool:
        return bool(self._settings("vocab_size"))

    @property
    def pairs_images(self) -> bool:
        """Whether images come beside the text, not in place of marked tokens in it."""
        keys = getattr(self.config, "__dict__", {})
        marks = any("image_token" in key for key in keys)
        return not marks and hasattr(self.config, "vision_config") and hasattr(self.config, "text_config")

    def ids(self, length: int) -> torch.Tensor:
        sizes = [value for value in self._settings("vocab_size") if isinstance(value, int)]
        sizes += [
            module.num_embeddings for module in self.model.modules() if isinstance(module, nn.Embedding)
        ][:1]
        # Low ids are special tokens in most vocabularies; a small one leaves no choice.
        high = min(sizes, default=100)
        low = min(10, high // 2)
        return torch.randint(low, high, (self.batch, length), generator=self.generator)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.batch, *shape, generator=self.generator).to(self.dtype)

    def pixel_values(self) -> torch.Tensor:
        image = (self.get("num_channels", 3), *pair(self.get("image_size", 32)))
        frames = self.get("num_frames", None)
        return self.floats(*image) if frames is None else self.floats(frames, *image)

    def pixel_values_videos(self) -> torch.Tensor:
        return self.floats(
            self.get("num_frames", 4), self.get("num_channels", 3), *pair(self.get("image_size", 32))
        )

    def input_features(self) -> torch.Tensor:
        bins = self.get("num_mel_bins", 80)
        positions = self.get("max_source_positions", None)
        stacks = self.get("conv_kernel_sizes", None)  # a subsampler in front: the length is free
        if positions is None or stacks is not None:
            return self.floats(64, self.get("input_feat_per_channel", bins))
        return self.floats(bins, 2 * positions)

    def input_values(self) -> torch.Tensor:
        frames, bins = (getattr(self.config, name, None) for name in ("max_length", "num_mel_bins"))
        if frames is not None and bins is not None:
            return self.floats(frames, bins)
        frames = self.length
        kernels, strides = self.get("conv_kernel", [400]), self.get("conv_stride", [320])
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            frames = (frames - 1) * stride + kernel  # as many samples as give that many frames
        return self.floats(frames)


def _single_tensor(model: nn.Module, parameters: Mapping[str, Any], make: Maker) -> dict[str, Any]:
    """The input of a module that takes one tensor, told by the first layer that has parameters."""
    required = [
        name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    first = next(
        (m for m in model.modules() if m._parameters and any(p is not None for p in m._parameters.values())),
        None,
    )
    if len(required) != 1:
        raise _unserved(model)
    if isinstance(first, nn.Embedding):
        return {required[0]: make.ids(make.length)}
    if isinstance(first, nn.Linear):
        return {required[0]: make.floats(make.length, first.in_features)}
    raise _unserved(model)


def _unserved(model: nn.Module) -> CaptureError:
    signature = inspect.signature(model.forward)
    return CaptureError(
        f"No example inputs can be made for {type(model).__name__}.forward{signature}. Pass "
        "example_inputs=..., a dict by argument name or a tuple in that order."
    )


def _first_free(candidates: Sequence[int], taken: set[int]) -> int:
    return next((n for n in candidates if n not in taken), candidates[0])
