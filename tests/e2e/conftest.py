from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from loramux.aio import AsyncClient
from loramux.launcher import Stack
from tests.e2e.status_watch import StatusWatch

# Fixtures that are a Stack of real processes.
_STACKS = ("stack", "pair")


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.gateway, adapter_store=stack.adapter_store) as client:
        yield client


@pytest.fixture(autouse=True)
async def at_rest(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After every test its engines live, hold no request, and have every page back; so their books add up."""
    stacks: list[Stack] = [request.getfixturevalue(name) for name in _STACKS if name in request.fixturenames]
    yield
    for stack in stacks:
        for address in stack.model_servers:
            async with StatusWatch(address) as watch:
                await watch.until_idle()
