"""The import law of ARCHITECTURE.md, over the syntax trees: what each package may know."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# Our packages that each of our packages may import besides itself.
LAW: dict[str, set[str]] = {
    "protos": set(),
    "kernels": set(),
    "observability": set(),
    "gateway": {"protos", "observability"},
    "adapter_store": {"protos", "observability"},
    "model_server": {"protos", "observability", "kernels"},
    "loramux": {"protos", "observability"},
}
OURS = {*LAW, "demo", "bench", "tests"}
WITHOUT_TORCH = ["protos", "observability", "gateway", "adapter_store", "loramux"]
# Decisions, tested without a model: these and whatever they import of ours use the standard library only.
PURE = [
    "model_server.request",
    "model_server.scheduler",
    "model_server.cold_adapters",
    "model_server.page_pool",
    "model_server.prefix_cache",
    "model_server.engine",
    "model_server.memory_budget",
    "gateway.routing",
    "gateway.queue",
]
MAX_LINES = 500


class Module(NamedTuple):
    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.split(".")[0]


def parse(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return Module(".".join(parts), path, ast.parse(path.read_text(), str(path)))


def modules(package: str) -> Iterator[Module]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if "_pb2" not in path.name:
            yield parse(path)


def imports(module: Module) -> Iterator[str]:
    """Full names of the modules it imports, wherever in the file; `from a import b` gives "a.b"."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_code(module: Module) -> Iterator[ast.AST]:
    """Every node but those under `if __name__ == "__main__"`: what is there for whoever imports it."""
    for statement in module.tree.body:
        if not (isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"):
            yield from ast.walk(statement)


def top(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("package", LAW)
def test_packages_know_only_what_they_may(package: str) -> None:
    for module in modules(package):
        known = {top(name) for name in imports(module)} & OURS
        assert known <= LAW[package] | {package}, f"{module.name} imports {sorted(known - LAW[package] - {package})}"


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_light_packages_stay_light(package: str) -> None:
    heavy = {"torch", "triton", "transformers", "peft"}
    for module in modules(package):
        found = {top(name) for name in imports(module)} & heavy
        assert not found, f"{module.name} imports {sorted(found)}"


@pytest.mark.parametrize("name", PURE)
def test_decisions_need_nothing_but_the_standard_library(name: str) -> None:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for imported in imports(parse(ROOT / f"{current.replace('.', '/')}.py")):
            if top(imported) in OURS:
                is_module = (ROOT / f"{imported.replace('.', '/')}.py").exists()
                waiting.append(imported if is_module else imported.rpartition(".")[0])
            else:
                assert top(imported) in sys.stdlib_module_names, f"{name} needs {imported} by way of {current}"


@pytest.mark.parametrize("package", LAW)
def test_the_environment_is_read_at_the_edge(package: str) -> None:
    for module in modules(package):
        if module.path.stem in {"config", "__main__"}:
            continue
        for node in imported_code(module):
            reads = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
            assert not reads, f"{module.name}:{getattr(node, 'lineno', 0)} reads the environment"
        assert "pydantic_settings" not in {top(name) for name in imports(module)}, f"{module.name} makes settings"


@pytest.mark.parametrize("package", LAW)
def test_only_telemetry_knows_the_sdk(package: str) -> None:
    for module in modules(package):
        sdk = [name for name in imports(module) if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
        assert not sdk or module.name == "observability.telemetry", f"{module.name} imports {sdk}"


@pytest.mark.parametrize("package", [*LAW, "demo", "bench"])
def test_no_file_outgrows_its_reader(package: str) -> None:
    for module in modules(package):
        lines = len(module.path.read_text().splitlines())
        assert lines <= MAX_LINES, f"{module.name} has {lines} lines"
