"""The load generator's own process: plays rounds of timed requests through a gateway. Spoken to as LineProcess does."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from loramux import ServiceError
from loramux.aio import AsyncClient


async def _one(client: AsyncClient, key: str, request: dict[str, Any], start_s: float) -> dict[str, Any]:
    await asyncio.sleep(max(0.0, request["arrival_s"] - (time.monotonic() - start_s)))
    stream = client.generate(
        request["prompt_ids"],
        adapter=request["adapter"],
        api_key=key,
        max_tokens=request["output_tokens"],
        ignore_eos=True,
    )
    token_times_s: list[float] = []
    async for delta in stream:
        token_times_s += [time.monotonic() - start_s] * len(delta.token_ids)
    assert stream.finished is not None
    return {"token_times_s": token_times_s, "adapter_load_s": stream.finished.timings.adapter_load_s}


async def _play(client: AsyncClient, keys: dict[str, str], requests: list[dict[str, Any]]) -> dict[str, Any]:
    start_s = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(client, keys[r["tenant"]], r, start_s)) for r in requests]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        if not isinstance(first, ServiceError):
            raise
        return {"error": str(first)}
    return {"outcomes": [task.result() for task in tasks]}


async def main() -> None:
    setup = json.loads(sys.stdin.readline())
    print(json.dumps({}), flush=True)
    async with AsyncClient(setup["gateway"]) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            requests = json.loads(line)
            print(json.dumps(await _play(client, setup["keys"], requests)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
