"""transformers models without their weights: built on meta, their checkpoint's names and conversions
followed, ties and buffers as `from_pretrained` makes them.

All that is particular to transformers' loader stands in this file. The conversion is not reimplemented:
transformers' own code runs on lazy tensors (`lazy.py`), on a hollow copy of the model, and what it puts there
is the recipe for each parameter."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint, same_values, shortened
from .coded import adopt
from .coded_formats import undistributed
from .errors import CheckpointError, ModelSourceError
from .lazy import LazyTensor, base, sources
from .model_source import _class_of, quiet
from .quantised import is_packed
from .recapture import hollow

CUTTABLE = ("torchao", "compressed-tensors")  # whose weights' parts can be tried (`quantised.py`)

# transformers patches torch and its own classes while it builds and initialises; simulated ranks share them.
_PATCHING = threading.RLock()


@contextmanager
def alone() -> Iterator[Any]:
    """transformers, with its patches to ourselves and its progress bars off."""
    with _PATCHING:
        try:
            import transformers
        except ImportError as error:
            raise ModelSourceError(
                "Loading a checkpoint needs transformers: pip install 'autotp[hf]'."
            ) from error
        logging = transformers.utils.logging
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with quiet():
                yield transformers
        finally:
            if bars:
                logging.enable_progress_bar()


def build_unloaded(
    path: Path, dtype: torch.dtype | None, floating: torch.dtype | None, **overrides: Any
) -> nn.Module:
    """The model of `path`'s config with all tensors on meta, untied, in eval mode.

    dtype: of the parameters; None: the config's, else `floating` (the checkpoint's). Modules that
    transformers keeps in float32 are. overrides: of the config. Raises ModelSourceError; CheckpointError for
    quantised weights."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ModelSourceError(f"dtype={dtype!r}: give a torch.dtype, such as torch.bfloat16.")
    with alone() as transformers:
        try:
            config, unused = transformers.AutoConfig.from_pretrained(
                str(path), return_unused_kwargs=True, **overrides
            )
        except Exception as error:  # transformers raises what it likes on a config
            raise ModelSourceError(f"{path}: transformers can't read its config: {error}") from error
        if unused:
            raise ModelSourceError(
                f"{', '.join(sorted(unused))}: neither an argument of autotp.load nor an entry of the config "
                f"of {path}."
            )
        quantisation = getattr(config, "quantization_config", None)
        if quantisation is not None and _method(quantisation) not in CUTTABLE:
            raise CheckpointError(_quantised(path, quantisation))
        cls: Any = _class_of(transformers, config, path / "config.json")
        wanted = dtype or getattr(config, "dtype", None) or floating or torch.float32
        for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))):
            if part is not None:
                part.dtype = wanted
        config.name_or_path = str(path)
        model = _unloaded(cls, config, wanted)
        _keep_precise(model, model._get_dtype_plan(wanted))
        return model.eval()


def _unloaded(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model on meta, its weights untied."""
    with ExitStack() as contexts:
        for context in cls.get_init_context(dtype, False, False, None):
            contexts.enter_context(context)
        return cls(config)


def _keep_precise(model: nn.Module, plan: Mapping[str, torch.dtype]) -> None:
    """Give the tensors that `plan` names by pattern the dtype it says."""
    if plan:
        from transformers.core_model_loading import build_glob_alternation

        pattern, group_of, _ = build_glob_alternation(list(plan))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            match = pattern.search(name)
            if match is not None:
                tensor.data = tensor.data.to(plan[group_of[match.lastgroup]])


def _method(how: Any) -> str:
    """How weights are quantised, as a config says it."""
    told = how if isinstance(how, Mapping) else vars(how)
    method = told.get("quant_method", "a method it does not name")
    return str(getattr(method, "value", method))


def _quantised(path: Path, how: Any) -> str:
    return (
        f"{path} is quantised ({_method(how)}): its weights are packed with scales, "
        "and autotp can't prove how to cut those. Load the unquantised checkpoint, or one quantised by "
        f"{' or '.join(CUTTABLE)}, or dequantise it first (from_pretrained, model.dequantize(), "
        "save_pretrained). bitsandbytes' are split by parallelize, when transformers has loaded them."
    )


def _quantizer(model: Any, checkpoint: Checkpoint) -> Any:
    """transformers' own reader of a quantised checkpoint; None for one that is not."""
    how = getattr(model.config, "quantization_config", None)
    if how is None:
        return None
    from transformers.quantizers import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(how, pre_quantized=True)
        quantizer.validate_environment()
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path} is quantised ({_method(how)}): {error}") from error
    quantizer.metadata = checkpoint.metadata
    with undistributed():
        quantizer._process_model_before_weight_loading(model)
    return quantizer


def recipes(
    model: nn.Module, checkpoint: Checkpoint, *, allow_missing: bool, allow_unexpected: bool
) -> dict[str, Tensor]:
    """For each name of the model's state dict that the checkpoint has: a lazy tensor, renamed and converted.

    Raises CheckpointError with every name that is missing, unexpected, of another shape, or that could not be
    converted. Nothing is read."""
    expected = model.state_dict()
    dtypes = {name: tensor.dtype for name, tensor in expected.items() if isinstance(tensor, Tensor)}
    if hasattr(model, "base_model_prefix"):
        found, missing, unexpected, wrong = _converted(model, checkpoint)
    else:
        found = {n: t for n, t in checkpoint.tensors.items() if n in dtypes}
        wrong = [
            _other_shape(n, t.shape, expected[n].shape)
            for n, t in found.items()
            if t.shape != expected[n].shape
        ]
        missing, unexpected = set(dtypes) - set(found), set(checkpoint.tensors) - set(dtypes)
    wrong += [
        f"packed: {name} is {dtype} in the checkpoint and {dtypes[name]} in the model: unpack it first"
        for name, tensor in found.items()
        if dtypes[name].is_floating_point and (dtype := _packed(tensor, dtypes[name])) is not None
    ]
    missing -= _tied_to_present(model, set(found))
    told = [] if allow_missing else [f"missing: {name}" for name in sorted(missing)]
    told = shortened(told) + shortened(sorted(wrong))
    told += [] if allow_unexpected else shortened([f"unexpected: {name}" for name in sorted(unexpected)])
    if told:
        raise CheckpointError(
            f"{checkpoint.path} does not fit {type(model).__name__}:\n"
            + "\n".join(f"  {line}" for line in told)
            + "\nallow_missing=True initialises what is missing, allow_unexpected=True leaves out the rest."
        )
    kept = {name for name, t in found.items() if t.dtype == dtypes[name] or is_packed(t)}
    return {name: t if name in kept else t.to(dtypes[name]) for name, t in found.items()}


def put_packed(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Put the quantised weights of `found`, still to be read, in the place of the model's: they are planned
    and cut as they are."""
    for name, tensor in found.items():
        if is_packed(tensor):
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._parameters[own] = nn.Parameter(tensor.detach(), requires_grad=False)


def _packed(tensor: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of quantised values that a floating tensor is made of: a cast would not dequantise them."""
    stored: list[torch.dtype] = [source.dtype for source in sources(tensor)]
    return next((d for d in stored if d != dtype and (d.itemsize == 1 or not d.is_floating_point)), None)


def _other_shape(name: str, got: Any, want: Any) -> str:
    return f"shape: {name} is {list(got)} in the checkpoint, {list(want)} in the model"


def _converted(model: Any, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], set[str], set[str], list[str]]:
    """What transformers makes of the checkpoint's tensors: found, missing, unexpected, and what went
    wrong."""
    with alone():
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        twin: Any = hollow(model)
        quantizer = _quantizer(twin, checkpoint)
        mapping = get_model_conversion_mapping(twin, hf_quantizer=quantizer)
        dtype = model.config.dtype
        how = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=mapping,
            hf_quantizer=quantizer,
        )
        info, _ = convert_and_load_state_dict_in_model(twin, dict(checkpoint.tensors), how)
        # Saving goes the same way back; what a quantiser made tensors of is taken apart otherwise.
        readers = quantizer.get_weight_conversions() if quantizer is not None else []
        read_by = {type(op) for reader in readers for op in reader.operations}
        model._weight_conversions = [
            conversion
            for conversion in twin._weight_conversions
            if not any(type(op) in read_by for op in getattr(conversion, "operations", ()))
        ]
        if quantizer is not None:
            model.hf_quantizer, model.config.quantization_config = quantizer, quantizer.quantization_config
        shapes = [_other_shape(*entry) for entry in info.mismatched_keys]
        errors = [
            f"conversion: {name}: {text.strip().splitlines()[-1]}"
            for name, text in info.conversion_errors.items()
        ]
        model._adjust_missing_and_unexpected_keys(info)
        adopt(twin)
        found = {
            name: tensor
            for name, tensor in twin.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor) and (hasattr(tensor, "source") or is_packed(tensor))
        }
        missing = set(info.missing_keys) - set(info.conversion_errors)
        return found, missing, set(info.unexpected_keys), shapes + errors


def _tied_to_present(model: nn.Module, present: set[str]) -> set[str]:
    """Names that need no tensor of their own: tied to one that is there."""
    groups: dict[str, set[str]] = {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        groups.setdefault(source, {source}).add(target)
    by_tensor: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(p), set()).add(name)
    return {
        n for group in (*groups.values(), *by_tensor.values()) if group & present for n in group - present
    }


def untied(model: nn.Module, found: Mapping[str, Tensor]) -> list[str]:
    """Names the config ties to another, while the checkpoint has both, with different values: those stay
    apart."""
    ties = getattr(model, "all_tied_weights_keys", {})
    return [t for t, s in ties.items() if t in found and s in found and not same_values(found[t], found[s])]


def tie(model: Any, found: Mapping[str, Tensor], apart: list[str]) -> None:
    """Tie the model's parameters as its config says, but for `apart`."""
    if not hasattr(model, "all_tied_weights_keys"):
        return
    for name in apart:
        model.all_tied_weights_keys.pop(name, None)
    missing = {n for n in model.state_dict() if n not in found}
    missing |= {
        t for t, s in model.all_tied_weights_keys.items() if s in found
    }  # the same values: one of them will do
    with alone():
        model.tie_weights(missing_keys=missing, recompute_mapping=False)


def initialise_rest(model: Any, found: Mapping[str, Tensor], device: torch.device) -> None:
    """Give a real tensor to what no checkpoint holds: buffers that are computed (rotary frequencies and the
    like), and what was allowed to be missing."""
    present = {id(t) for n, t in model.state_dict(keep_vars=True).items() if n in found}
    rest = [(m, n, t) for m in model.modules() for n, t in (*m._parameters.items(), *m._buffers.items())
            if t is not None and t.device.type == "meta" and id(t) not in present]  # fmt: skip
    if not rest:
        return
    if not hasattr(model, "initialize_weights"):
        names = [n for n, b in model.named_buffers() if any(b is t for _, _, t in rest)]
        raise CheckpointError(
            f"{type(model).__name__} makes {', '.join(names[:5])} itself, which can't be done again from "
            "outside. Build it off meta, or register them as persistent buffers."
        )
    real: dict[int, Tensor] = {}
    for module, name, tensor in rest:
        if id(tensor) not in real:
            empty = torch.empty_like(tensor, device=device)
            real[id(tensor)] = (
                nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            )
        setattr(module, name, real[id(tensor)])
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = id(tensor) in present
    with alone():
        model.initialize_weights()


def adopt_generation_config(model: Any, path: Path) -> None:
    """The checkpoint's generation config, as `from_pretrained` finds it."""
    if hasattr(model, "adjust_generation_fn") and model.can_generate():
        with alone():
            model.adjust_generation_fn(
                None, False, None, str(path), cache_dir=None, force_download=False, proxies=None,
                local_files_only=True, token=None, revision=None, subfolder="", trust_remote_code=False,
            )  # fmt: skip


# ---------------------------------------------------------------- saving
def saved_names(model: Any, state: Mapping[str, Tensor]) -> list[str]:
    """Which names of the state dict are stored: of tied ones the one that transformers expects on loading.

    Raises CheckpointError where tensors share memory in a way that the model does not declare.
    """
    names = [n for n in state if n not in (getattr(model, "_keys_to_ignore_on_save", None) or ())]
    if not hasattr(model, "_tied_weights_keys"):
        first = {id(state[n]): n for n in reversed(names)}
        return [n for n in names if first[id(state[n])] == n]
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    try:
        return list(remove_tied_weights_from_state_dict({n: state[n].detach() for n in names}, model))
    except RuntimeError as error:
        raise CheckpointError(str(error)) from error


def saved_entries(model: Any, entries: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors as the checkpoint names and shapes them: the conversions of loading, undone."""
    if not hasattr(model, "base_model_prefix"):
        return dict(entries)
    with alone():
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion

        used = getattr(model, "_weight_conversions", None)
        if used is None and not get_model_conversion_mapping(model, add_legacy=False):
            return dict(entries)
        whole: Any = _unloaded(
            type(model), copy.deepcopy(model.config), model.dtype
        )  # with the sizes of the whole
        if used is not None:
            whole._weight_conversions = used
        return revert_weight_conversion(whole, dict(entries))


@dataclass(frozen=True)
class Files:
    """`names`: of each file. `size`: the bytes that the index states."""

    names: dict[str, list[str]]
    size: int


def split_into_files(entries: Mapping[str, LazyTensor], limit: int | str, variant: str | None) -> Files:
    """Which file holds which names, as save_pretrained does it: files of about `limit` bytes, in the order
    given, but what are views of one tensor in one file."""
    stem = f"model.{variant}" if variant else "model"
    size = sum(t.numel() * t.element_size() for t in entries.values())
    if limit == "50GB" and size <= 50 * 10**9:
        return Files({f"{stem}.safetensors": list(entries)}, size)
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError as error:
        raise CheckpointError(
            "Splitting a model over files needs huggingface_hub: pip install 'autotp[hf]'."
        ) from error
    split = split_state_dict_into_shards_factory(
        dict(entries),
        get_storage_size=lambda t: base(t).numel() * t.element_size(),  # of a view, what it keeps alive
        get_storage_id=lambda t: id(base(t)),
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=limit,
    )
    return Files(split.filename_to_tensors, split.metadata["total_size"])
