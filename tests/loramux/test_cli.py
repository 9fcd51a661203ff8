from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from loramux.cli import app
from protos import common_pb2, errors, gateway_pb2
from tests.loramux import scripted
from tests.loramux.scripted import ScriptedServer


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_generate_streams_to_stdout_and_sums_up_on_stderr(server: ScriptedServer) -> None:
    result = run("generate", "Hi", "--adapter", "sentiment", "--gateway", server.address, "--max-tokens", "5")
    assert result.exit_code == 0
    assert result.stdout == "Hello 🌶️\n"
    assert "sentiment@abababababab, 3 + 3 tokens, first after" in result.stderr
    sent = server.generation.request
    assert sent.prompt.chat.messages == [common_pb2.ChatMessage(role="user", content="Hi")]
    assert sent.sampling == common_pb2.SamplingParams(max_tokens=5)


def test_generate_raw_and_every_sampling_option(server: ScriptedServer) -> None:
    options = "--raw --temperature 0.5 --top-p 0.25 --top-k 3 --min-p 0.125 --seed 4 --repetition-penalty 1.5"
    options += " --presence-penalty 0.5 --frequency-penalty 0.75 --stop a --stop b --ignore-eos --priority low"
    result = run("generate", "Hi", *options.split(), "--gateway", server.address, "--api-key", "k")
    assert result.exit_code == 0, result.stderr
    sent = server.generation.request
    assert sent.prompt.text == "Hi" and sent.priority == common_pb2.PRIORITY_LOW
    assert sent.sampling == common_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=4,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.75,
        stop=["a", "b"],
        ignore_eos=True,
    )
    assert server.generation.metadata["authorization"] == "Bearer k"


def test_a_typed_error_is_one_line_and_status_1(server: ScriptedServer) -> None:
    async def refuse(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
        raise errors.not_found("adapter", "x[y]", "no adapter 'x[y]'")
        yield

    server.generation.script = refuse
    result = run("generate", "Hi", "-a", "x[y]", "--gateway", server.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: NOT_FOUND: no adapter 'x[y]'\n"


def test_system_needs_chat(server: ScriptedServer) -> None:
    assert run("generate", "Hi", "--raw", "--system", "x", "--gateway", server.address).exit_code == 2


def test_models(server: ScriptedServer) -> None:
    result = run("models", "--gateway", server.address)
    assert result.stdout.splitlines() == [
        "tiny, context 128",
        "sentiment\tabababababab\t1\tprod → abababababab",
        "here:1\tready\t0\t",
    ]


def test_adapters(server: ScriptedServer, adapter_dir: Path) -> None:
    at = ("--adapter-store", server.address)
    assert run("adapters", "push", str(adapter_dir), "mine", "--alias", "prod", *at).stdout == scripted.REVISION + "\n"
    listed = run("adapters", "list", *at).stdout.split("\t")
    assert listed[:4] == ["mine", scripted.REVISION, "", "8"]
    assert run("adapters", "alias", "mine", "prod", scripted.REVISION, *at).stdout == "new\n"
    assert run("adapters", "alias", "mine", "prod", "--remove", *at).exit_code == 0
    assert run("adapters", "rm", "mine", scripted.REVISION, *at).stdout == "deleted 1\n"


@pytest.mark.parametrize(
    "arguments", [("alias", "a", "b"), ("alias", "a", "b", "c", "--remove"), ("rm", "a"), ("rm", "a", "b", "--all")]
)
def test_what_would_delete_or_change_must_be_said(arguments: tuple[str, ...]) -> None:
    assert run("adapters", *arguments).exit_code == 2


def test_push_of_no_directory_is_one_line() -> None:
    result = run("adapters", "push", "/nowhere", "mine")
    assert result.exit_code == 1
    assert result.stderr == "error: INVALID_ARGUMENT: directory: '/nowhere' is not a directory\n"


COMMANDS = ["up", "generate", "models", "adapters push", "adapters list", "adapters alias", "adapters rm"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: loramux {command}" in " ".join(result.stdout.split())


def test_as_a_process(server: ScriptedServer) -> None:
    command = [Path(sys.executable).with_name("loramux"), "generate", "Hi", "--gateway", server.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stdout) == (0, "Hello 🌶️\n")
    assert "tiny, 3 + 3 tokens" in result.stderr and "\x1b" not in result.stderr
