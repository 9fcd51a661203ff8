"""What crosses between the serving process and the engine process. Plain pickled data; standard library only.

Keys are numbers given by the bridge, never reused: a late cancel cannot hit a newer request with the same external id.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_server.request import AdapterRef, Finish, Sampling
from model_server.runner import RunnerInfo, Sampled


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed: a canonical code's name and a sentence; `status` is a serialized google.rpc.Status when a
    service reported the failure, passed through unread. `damaged_files`: what was fetched cannot be read."""

    code: str
    message: str
    status: bytes = b""
    damaged_files: bool = False


# To the engine


@dataclass(frozen=True, slots=True)
class Submit:
    key: int
    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    adapter: AdapterRef | None
    priority: int
    tenant: str
    arrived_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Cancel:
    key: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Answered by one PinEnded, once the adapter is resident or cannot be."""

    key: int
    ref: AdapterRef


@dataclass(frozen=True, slots=True)
class Unpin:
    ref: AdapterRef


@dataclass(frozen=True, slots=True)
class AdapterFetched:
    """The files stand in `path`, verified, until AdapterDone is reported for `ref`."""

    ref: AdapterRef
    path: str


@dataclass(frozen=True, slots=True)
class AdapterMissing:
    """It is not on local disk, and a download was not asked for."""

    ref: AdapterRef


@dataclass(frozen=True, slots=True)
class AdapterFetchFailed:
    ref: AdapterRef
    failure: Failure


@dataclass(frozen=True, slots=True)
class Stop:
    pass


# From the engine


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of loading the model's weights."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    info: RunnerInfo


@dataclass(frozen=True, slots=True)
class AdapterWanted:
    """Answered by AdapterFetched, by AdapterFetchFailed or, unless it may `download`, by AdapterMissing."""

    ref: AdapterRef
    download: bool


@dataclass(frozen=True, slots=True)
class AdapterDone:
    """The files of `ref` are no longer needed: they are in host memory, were refused, are not `readable`, or nobody waits
    for them any more, or not soon."""

    ref: AdapterRef
    readable: bool


@dataclass(frozen=True, slots=True)
class Started:
    """First scheduled: from here on the request has a place."""

    key: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Tokens:
    key: int
    index: int  # of the first in the output
    sampled: list[Sampled]


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The next prompt tokens with their log probabilities, in order, from the second token on."""

    key: int
    scored: list[Sampled]


@dataclass(frozen=True, slots=True)
class Ended:
    """Last word on a request. Times are on the machine's monotonic clock, seconds; None where it never got there."""

    key: int
    finish: Finish
    num_cached: int
    failure: Failure | None
    num_output: int
    stop_token_id: int | None
    parked_s: float | None
    adapter_load_s: float
    parked: bool  # to the end: its adapter never came
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class PinEnded:
    """`failure` None: the adapter is resident and stays so."""

    key: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Status:
    """The engine as it stands after a step."""

    step: int
    running: int
    waiting: int
    parked: int
    free_pages: int
    resident: tuple[AdapterRef, ...]
    free_rank_rows: int
    pinned: tuple[AdapterRef, ...] = ()
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
