"""From verified files to the layout the bank wants: reads an adapter, checks it against this model, lays it out.

Layout per group (see kernels/layouts.py): a [L, r, S, K] and b [L, r, N], scaling folded into b in fp32 before the
cast, r the largest true rank in the group. What an adapter does not adapt stays zero with rank 0 and is never read.
"""

from __future__ import annotations

import errno
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from model_server.adapter_bank import HostAdapter
from model_server.messages import Failure
from model_server.model_config import ModelConfig
from model_server.models.llama import lora_groups
from model_server.request import AdapterRef
from protos import adapter_format
from protos.errors import ServiceError, failed_precondition, quote

# Errors of a read that say nothing about the file.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_MODULE = re.compile(r"model\.layers\.(\d+)\.(.+)")


class DamagedFilesError(Exception):
    """What was fetched cannot be read."""


class AdapterRefusedError(Exception):
    """The adapter does not fit this model. The message names the module and both sides' numbers."""


Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # of a group's a and b


class Allocate(Protocol):
    def __call__(self, num_values: int, /, *, dtype: torch.dtype) -> Tensor: ...


@dataclass(slots=True)
class GroupWeights:
    a: Tensor  # [L, r, S, K] in the bank's dtype
    b: Tensor  # [L, r, N]
    ranks: list[int]  # [S], the largest over the layers


def load(
    ref: AdapterRef, path: Path, config: ModelConfig, dtype: torch.dtype, max_rank: int, allocate: Allocate
) -> HostAdapter | Failure:
    """As `load_adapter`; what is wrong with the files becomes the answer of the requests that want them."""
    try:
        return load_adapter(path, config, dtype, max_rank, allocate)
    except AdapterRefusedError as error:
        return _refused(ref, str(error))
    except ServiceError as error:
        return _refused(ref, error.message)
    except DamagedFilesError as error:
        message = f"adapter {ref.adapter_id}: its files cannot be read: {error}"
        return Failure("UNAVAILABLE", message, damaged_files=True)
    except (OSError, MemoryError) as error:  # what lacks is memory or descriptors, here: the files are as they were
        return Failure("RESOURCE_EXHAUSTED", f"adapter {ref.adapter_id}: it cannot be laid out: {error}")
    except Exception as error:  # whatever a file can provoke must end its own requests only
        return Failure("INTERNAL", f"adapter {ref.adapter_id}: {type(error).__name__}: {error}")


def _refused(ref: AdapterRef, reason: str) -> Failure:
    error = failed_precondition("adapter", ref.adapter_id, f"adapter {ref.adapter_id}: {reason}")
    return Failure(error.code.name, error.message, error.to_status().SerializeToString())


def views(flat: Tensor, shapes: Mapping[str, Shapes]) -> dict[str, tuple[Tensor, Tensor]]:
    """`flat` cut into each group's a and b, in order."""
    parts = iter(torch.split(flat, [math.prod(shape) for pair in shapes.values() for shape in pair]))
    return {group: (next(parts).view(a), next(parts).view(b)) for group, (a, b) in shapes.items()}


def load_adapter(
    path: Path, config: ModelConfig, dtype: torch.dtype, max_rank: int, allocate: Allocate = torch.zeros
) -> HostAdapter:
    """Read `path` (adapter_config.json, adapter_model.safetensors). All or nothing. The weights are `views` of what
    `allocate` gives, which must be zeros.

    Raises AdapterRefusedError where a module is not in this model or a shape is another model's, DamagedFilesError where
    the files are missing or not what was verified.
    """
    config_bytes, stored = _read(path)
    adapter = adapter_format.parse_config(config_bytes)
    groups = lora_groups(config)
    place = {
        module: (group, slice_index)
        for group, (_, slices) in groups.items()
        for slice_index, (module, _) in enumerate(slices)
    }
    tensors = {_module_of(key): tensor for key, tensor in stored.items()}
    modules = sorted({module for module, _ in tensors})
    if not modules:
        raise AdapterRefusedError("it adapts no module")
    sites: dict[str, tuple[int, str, int]] = {}
    for module in modules:
        match = _MODULE.fullmatch(module)
        if match is None or match[2] not in place:
            known = ", ".join(f"model.layers.N.{name}" for name in place)
            raise AdapterRefusedError(f"module {quote(module)} is not one this server adapts ({known})")
        layer = int(match[1])
        if layer >= config.num_layers:
            raise AdapterRefusedError(
                f"module {module} is in layer {layer}, the base model has {config.num_layers} layers"
            )
        sites[module] = (layer, *place[match[2]])

    ranks: dict[str, list[int]] = {group: [0] * len(slices) for group, (_, slices) in groups.items()}
    for module, (_, group, slice_index) in sites.items():
        a, b = tensors[module, "A"], tensors[module, "B"]
        in_features, slices = groups[group]
        expected = slices[slice_index][1], in_features
        found = b.shape[0], a.shape[1]
        if found != expected:
            raise AdapterRefusedError(
                f"module {module} maps {found[1]} to {found[0]} features, the base model's maps {expected[1]} to {expected[0]}"
            )
        rank = a.shape[0]
        if b.shape[1] != rank:
            raise AdapterRefusedError(f"module {module} has lora_A of rank {rank} and lora_B of rank {b.shape[1]}")
        if rank > max_rank:
            raise AdapterRefusedError(f"module {module} has rank {rank}, this server takes at most {max_rank}")
        ranks[group][slice_index] = max(ranks[group][slice_index], rank)

    shapes: dict[str, Shapes] = {}
    for group, (in_features, slices) in groups.items():
        if rank := max(ranks[group]):
            width = sum(out_features for _, out_features in slices)
            shapes[group] = (config.num_layers, rank, len(slices), in_features), (config.num_layers, rank, width)
    flat = allocate(sum(math.prod(shape) for pair in shapes.values() for shape in pair), dtype=dtype)
    weights = {group: GroupWeights(a, b, ranks[group]) for group, (a, b) in views(flat, shapes).items()}
    # All layers at once: an adapter has hundreds of small tensors, and torch's calls cost more than the bytes.
    alike: dict[tuple[str, int, int], dict[int, str]] = {}  # group, slice, rank -> layer -> module
    for module, (layer, group, slice_index) in sites.items():
        alike.setdefault((group, slice_index, tensors[module, "A"].shape[0]), {})[layer] = module
    for (group, slice_index, rank), by_layer in alike.items():
        layers = _index(sorted(by_layer), config.num_layers)
        members = [by_layer[layer] for layer in sorted(by_layer)]
        offset = sum(out for _, out in groups[group][1][:slice_index])
        scalings = torch.tensor([adapter.scaling_of(module) for module in members], dtype=torch.float32)
        weights[group].a[layers, :rank, slice_index] = torch.stack([tensors[m, "A"] for m in members]).to(dtype)
        scaled = torch.stack([tensors[m, "B"] for m in members]).float() * scalings.view(-1, 1, 1)  # [layers, N, r]
        columns = slice(offset, offset + scaled.shape[1])
        weights[group].b[layers, :rank, columns] = scaled.to(dtype).transpose(1, 2)
    for group, laid_out in weights.items():
        if not (_finite(laid_out.a) and _finite(laid_out.b)):
            raise AdapterRefusedError(f"its weights times their scaling exceed the range of {dtype} (group {group})")
    return HostAdapter(
        rank_rows={group: max(ranks[group]) for group in weights},
        num_bytes=flat.nbytes,
        weights=weights,
    )


def _read(path: Path) -> tuple[bytes, dict[str, Tensor]]:
    """The configuration, and the tensors by their names: all at once, which is faster than hundreds of small reads."""
    try:
        config = (path / adapter_format.CONFIG_FILE).read_bytes()
        return config, safetensors.torch.load((path / adapter_format.TENSORS_FILE).read_bytes())
    except SafetensorError as error:
        raise DamagedFilesError(str(error)) from error
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        raise DamagedFilesError(str(error)) from error


# Adapters of one kind have the same names.
_module_of = functools.lru_cache(maxsize=1 << 16)(adapter_format.module_of)


def _index(layers: list[int], num_layers: int) -> slice | Tensor:
    return slice(None) if len(layers) == num_layers else torch.tensor(layers)


def _finite(tensor: Tensor) -> bool:
    """Whether all of it is: its extremes are not where one value is not."""
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())
