"""A peer: somebody else's engine in its own environment (peer_setup.py), driven by the scripts of bench/peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Self

from bench import peer_setup
from bench.engines.engine import Setup
from bench.engines.line_process import LineProcess
from bench.measure import Outcome
from bench.workloads import Request


class PeerEngine:
    """See `Engine`."""

    def __init__(self, name: str, setup: Setup) -> None:
        """Raises ValueError for what this peer cannot do or is not set up for."""
        peer = peer_setup.PEERS[name]
        if setup.adapters and not peer.serves_adapters:
            raise ValueError(
                f"adapters: {name} applies one adapter to a whole batch; it is a peer for the base model only"
            )
        if setup.device != "cpu":
            raise ValueError(f"device: {name} is set up for the CPU only")
        if setup.settings:
            raise ValueError(f"set: {name} takes no settings of the model server")
        if not peer_setup.python_of(name).exists():
            raise ValueError(f"engine: {name} is not installed here: run `make bench-peers`")
        self._name = name
        self._peer = peer
        self._setup = setup
        self.facts: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        setup = self._setup
        scripts = peer_setup.SCRIPTS
        self._process = LineProcess(
            # -P: what lies beside the script is not on the import path.
            [peer_setup.python_of(self._name), "-P", scripts / "runner.py", self._peer.script],
            {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **peer_setup.environment_of(self._name)},
            peer_setup.BUILD / "bench" / f"{self._name}.log",
            stopped_between=True,
        )
        try:
            self.facts = self._process.ask(
                {
                    "model": str(peer_setup.model_for(self._name, setup.model)),
                    "dtype": setup.dtype,
                    "adapters": {name: str(path) for name, path in setup.adapters.items()},
                    "max_rank": setup.max_rank,
                    "max_tokens": setup.max_tokens,
                    "max_resident": setup.max_resident,
                    "max_running": setup.max_running,
                }
            )
        except BaseException:
            self._process.stop()
            raise
        return self

    def play(self, requests: Sequence[Request]) -> list[Outcome]:
        answer = self._process.ask([asdict(request) for request in requests])
        return [Outcome(tuple(outcome["token_times_s"])) for outcome in answer]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.stop()
