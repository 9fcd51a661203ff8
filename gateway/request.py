"""A request as the gateway's pure parts see it. Plain data; times are seconds on the caller's monotonic clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class AdapterRef(NamedTuple):
    adapter_id: str
    revision: str


class Priority(enum.IntEnum):
    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    tenant: str
    priority: Priority
    adapter: AdapterRef | None  # None: the base model
    cost: int  # tokens it is expected to use, at least 1
    tried: set[str] = field(default_factory=set)  # replicas that failed it
    charged: Priority | None = None  # the class it was taken from, where its tenant was charged
