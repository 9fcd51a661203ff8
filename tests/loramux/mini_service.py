"""A service as the launcher expects one, small enough to start in a blink. What it does is said by its argument:

serve     serve until SIGTERM; first start a child that would outlive it
crash     serve, then end with status 3 on the first health check
stubborn  serve, and ignore SIGTERM
broken    complain and end before serving
"""

import asyncio
import json
import os
import signal
import sys

from protos.serving import Serving


async def main(manner: str) -> None:
    if manner == "broken":
        print("no model at /nowhere", file=sys.stderr)
        sys.exit(2)
    await asyncio.create_subprocess_exec("sleep", "1000")
    serving = Serving()
    if manner == "crash":
        serving.health.Watch = lambda request, context: os._exit(3)
    await serving.start("127.0.0.1:0", [])
    await serving.set_ready(True)
    entry = {"event": "serving", "address": f"127.0.0.1:{serving.port}"}
    print("not JSON, as some libraries print", file=sys.stderr)
    print(json.dumps(entry), file=sys.stderr, flush=True)
    run = asyncio.create_task(serving.run_until_stopped(grace_s=1))
    await asyncio.sleep(0)
    if manner == "stubborn":
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await run


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
