"""Health v1 from the outside: wait until a server is SERVING. As a command it is what containers are checked with.

python -m protos.health localhost:50051 [timeout_s]
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import errors, serving


def wait_serving(address: str, timeout_s: float, service: str = "") -> None:
    """Return as soon as `service` ("" is the server as a whole) at `address` is SERVING.

    Raises ServiceError: DEADLINE_EXCEEDED after `timeout_s`, UNAVAILABLE as soon as a server that answered goes away.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(address, options=serving.CHANNEL_OPTIONS) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=timeout_s, wait_for_ready=True)
        try:
            for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            watch.cancel()
    raise errors.unavailable(f"{address} ended the health watch before it was serving")


def main(arguments: list[str]) -> int:
    """Exit status 0 when serving within the time, 1 with one line on stderr when not, 2 on wrong use."""
    if len(arguments) not in (1, 2):
        print("usage: python -m protos.health HOST:PORT [TIMEOUT_S]", file=sys.stderr)
        return 2
    try:
        wait_serving(arguments[0], float(arguments[1]) if len(arguments) == 2 else 2.0)
    except errors.ServiceError as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
