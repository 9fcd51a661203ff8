"""The interface of everything that is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.measure import Outcome
from bench.workloads import Request


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is started with. All engines get the same."""

    model: str  # "smollm2" or a Hugging Face directory
    dtype: str  # bfloat16, float32 or float16: of weights, activations and KV
    adapters: Mapping[str, Path]  # PEFT directories by name
    max_rank: int  # of these, 0 without any
    adapter_bytes: int | None  # on the device, where all are to be resident at once; None: as the engine has it
    max_tokens: int  # the longest prompt plus output
    tenants: tuple[str, ...]
    max_resident: int | None = None  # adapters on the device at a time; None: as many as the engine holds
    max_running: int = 64  # requests in one batch
    device: str = "cpu"
    # Of our model server only, by the names of its configuration.
    settings: Mapping[str, str] = field(default_factory=dict)


class Engine(AbstractContextManager["Engine"], Protocol):
    """Started by entering; holds its processes until it is left. Raises RuntimeError where it fails."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What stands beside its figures: version, dtype."""

    def play(self, requests: Sequence[Request]) -> list[Outcome]:
        """One round, to the last token of the last request."""
