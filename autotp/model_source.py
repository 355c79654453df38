"""The MODEL of the command line: a config, or a function that builds a model.

    a directory with a config.json   or a config file     the class is the config's own architectures[0]
    package.module:function                               called without arguments, gives an nn.Module

Built on the meta device it takes no memory, so shapes of any size can be planned on a laptop. transformers is
imported only when a config is read.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import ModelSourceError

# What configs call their numbers of layers: for `layers=`, which asks for a shorter model of the same kind.
_DEPTHS = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
)


def build_model(
    source: str, *, device: str = "meta", layers: int | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the model that `source` names, in eval mode.

    device: where its tensors are made; `meta` needs no memory. layers: so many layers instead of the config's
    own. dtype: of its parameters; by default the config's. Raises ModelSourceError, with what to give
    instead.
    """
    if ":" in source and not Path(source).exists():
        if layers is not None:
            raise ModelSourceError(
                f"--layers shortens a model made from a config; {source} builds its own. Give it fewer there."
            )
        model = _call(source, device)
    else:
        model = _from_config(Path(source), device, layers, dtype)
    return model.eval()


def _call(source: str, device: str) -> nn.Module:
    module_name, _, attribute = source.partition(":")
    try:
        with _importable_here():
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelSourceError(
            f"{source}: importing {module_name!r} failed: {error}. "
            "Give package.module:function, importable from this directory."
        ) from error
    except Exception as error:
        raise _raised(source, f"importing {module_name!r}", error) from error
    builder: Any = module
    for name in attribute.split("."):
        builder = getattr(builder, name, None)
    if not callable(builder):
        has = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name
        ][:8]
        raise ModelSourceError(
            f"{source}: {module_name} has no function {attribute!r}. It has: {', '.join(has) or 'none'}."
        )
    try:
        with torch.device(device):
            model = builder()
    except Exception as error:
        raise _raised(source, f"{attribute}()", error) from error
    if not isinstance(model, nn.Module):
        raise ModelSourceError(f"{source} gave a {type(model).__name__}; it must return an nn.Module.")
    return model


def _raised(source: str, what: str, error: Exception) -> ModelSourceError:
    """What the user's own code raised, at the last of its lines."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # from what autotp called
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    at = (own or frames)[-1:]
    where = f" at {at[0].filename}:{at[0].lineno} in {at[0].name}" if at else ""
    return ModelSourceError(f"{source}: {what} raised {type(error).__name__}: {error}{where}")


@contextmanager
def _importable_here() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _from_config(path: Path, device: str, layers: int | None, dtype: torch.dtype | None) -> nn.Module:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = "has no config.json" if path.is_dir() else "is no file or directory"
        raise ModelSourceError(
            f"{path} {what}. MODEL is a directory with a config.json, a config file, or "
            "package.module:function."
        )
    try:
        raw = json.loads(file.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise ModelSourceError(
            f"{file} is no model config: {error}. Give a config.json as Hugging Face writes it."
        ) from error
    try:
        import transformers
    except ImportError as error:
        raise ModelSourceError("Reading a config needs transformers: pip install 'autotp[hf]'.") from error
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(str(file))
    except (
        Exception
    ) as error:  # transformers raises what it likes on a config: all of it is the file's fault here
        raise ModelSourceError(
            f"{file}: transformers {transformers.__version__} can't read it: {_first_line(error)}"
        ) from error
    if layers is not None:
        _shorten(config, layers)
    cls = _class_of(transformers, config, file)
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    try:
        with quiet(), torch.device(device), _default_dtype(wanted):
            return cls(config)
    except ImportError as error:
        raise ModelSourceError(
            f"{file}: building {cls.__name__} needs a package that is missing: {_first_line(error)}"
        ) from error
    except Exception as error:
        raise ModelSourceError(
            f"{file}: {cls.__name__} could not be built from it: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _class_of(transformers: Any, config: Any, file: Path) -> type[nn.Module]:
    """The class the config names; without a name, the one that its kind of config is made for."""
    names = getattr(config, "architectures", None) or []
    if names:
        cls = getattr(transformers, names[0], None)
        if cls is None:
            raise ModelSourceError(
                f"{file}: its architecture {names[0]!r} is not a class of transformers "
                f"{transformers.__version__}. If it ships with code of its own, give a "
                "package.module:function that builds it."
            )
        return cls
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ModelSourceError(
        f'{file}: it names no class. Add "architectures": ["LlamaForCausalLM"], or whichever it is for.'
    )


def _shorten(config: Any, layers: int) -> None:
    """Set every depth of the config, and of those nested in it, to at most `layers`; lists with an entry a
    layer follow."""
    nested = [v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "model_type")]
    for inner in nested:
        _shorten(inner, layers)
    for name in _DEPTHS:
        depth = getattr(config, name, None)
        if not isinstance(depth, int) or depth <= layers:
            continue
        for key, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == depth:
                setattr(config, key, value[:layers])
        setattr(config, name, layers)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, and notices of transformers if it is loaded: what matters comes as an error."""
    transformers = sys.modules.get("transformers")
    logging = transformers.utils.logging if transformers is not None else None
    before = logging.get_verbosity() if logging is not None else 0
    if logging is not None:
        logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if logging is not None:
            logging.set_verbosity(before)


def randomise(model: nn.Module, seed: int = 0, spread: float = 0.02) -> None:
    """Add noise to every parameter of `model`, so that no bias is zero and no norm is one and mistakes in
    them show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(spread * noise.to(parameter))
