"""Plays rounds of timed requests on a peer, inside the peer's own environment. Standard library only, and none of ours.

    python -P runner.py vllm_cpu.py

Lines of JSON: the set-up comes in first, facts about the peer go out once it has loaded; from then on each line in is a
round's requests, each line out their outcomes. What the peer itself prints goes to stderr.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Emit = Callable[[int, int], None]  # (index of the request in its round, how many new tokens)


class Backend(Protocol):
    """What a peer's script defines as `Backend`; made of the set-up."""

    facts: dict[str, Any]

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Take request `index` of the round."""

    def step(self, emit: Emit) -> None:
        """Work on what was added, blocking; tell of every token as soon as it is there."""


def play(backend: Backend, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    token_times_s: list[list[float]] = [[] for _ in requests]
    missing = [request["output_tokens"] for request in requests]
    start_s = time.monotonic()

    def emit(index: int, num_tokens: int) -> None:
        token_times_s[index] += [time.monotonic() - start_s] * num_tokens
        missing[index] -= num_tokens

    due = sorted(range(len(requests)), key=lambda index: requests[index]["arrival_s"])
    added: list[int] = []
    while due or any(missing[index] > 0 for index in added):
        while due and requests[due[0]]["arrival_s"] <= time.monotonic() - start_s:
            index = due.pop(0)
            backend.add(index, requests[index])
            added.append(index)
        if any(missing[index] > 0 for index in added):
            backend.step(emit)
        else:
            time.sleep(max(0.0, requests[due[0]]["arrival_s"] - (time.monotonic() - start_s)))
    return [{"token_times_s": times} for times in token_times_s]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    backend = runpy.run_path(str(Path(__file__).with_name(sys.argv[1])))["Backend"](setup)
    print(json.dumps(backend.facts), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(play(backend, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
