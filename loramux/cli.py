"""The `loramux` command: run a stack, generate from the terminal, manage adapters."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.status import Status

from loramux import adapter_commands, config
from loramux.client import Client
from loramux.config import StackConfig
from loramux.launcher import Stack
from loramux.requests import Priority, Prompt
from loramux.service_process import LaunchError
from loramux.terminal import err, fail, out, reported, short, show_rows, summary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve many LoRA adapters from one base model.",
    epilog="Start with: loramux up, and in another terminal: loramux generate 'Hello'",
)
app.add_typer(adapter_commands.app, name="adapters")

Gateway = Annotated[str, typer.Option(help="Address of the gateway.", envvar="LORAMUX_CLIENT_GATEWAY")]
ApiKey = Annotated[str | None, typer.Option(help="Key the gateway knows you by.", envvar="LORAMUX_CLIENT_API_KEY")]
DEFAULT_GATEWAY = f"localhost:{config.GATEWAY_PORT}"


def main() -> None:
    app()


@app.command(epilog="Example: loramux up --replicas 2 --model ./Llama-3.2-1B --gateway-port 50051")
def up(
    model: Annotated[
        str, typer.Option(help="'smollm2', a Hugging Face directory or a .gguf file.", show_default=True)
    ] = "smollm2",
    replicas: Annotated[int, typer.Option(min=1, help="Number of model servers.")] = 1,
    data_dir: Annotated[Path, typer.Option(help="Where adapters, caches and logs are kept.")] = config.DATA_DIR,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    gateway_port: Annotated[int, typer.Option(help="0 takes a free one, as for the ports below.")] = (
        config.GATEWAY_PORT
    ),
    model_server_port: Annotated[int, typer.Option(help="Of the first model server.")] = config.MODEL_SERVER_PORT,
    adapter_store_port: Annotated[int, typer.Option(help="Of the adapter store.")] = config.ADAPTER_STORE_PORT,
    start_timeout: Annotated[float, typer.Option(help="Seconds to wait for the model to load.")] = 300.0,
    logs: Annotated[bool, typer.Option("--logs", help="Show the services' logs here as well.")] = False,
) -> None:
    """Run adapter store, model servers and gateway until Ctrl-C, which stops them all."""
    data_dir = data_dir.expanduser()
    stack = Stack(
        StackConfig(
            data_dir=data_dir,
            model=model,
            replicas=replicas,
            host=host,
            gateway_port=gateway_port,
            model_server_port=model_server_port,
            adapter_store_port=adapter_store_port,
            start_timeout_s=start_timeout,
        ),
        on_line=(lambda name, line: err.print(f"{name} | {line}", markup=False, soft_wrap=True)) if logs else None,
        on_state=lambda name, state: _show_state(stack, status, name, state),
    )
    status = err.status(f"loading {model}")
    # However it is asked to stop, it stops the way Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with status:
            stack.start()
        err.print(f"ready at [bold]{stack.gateway}[/], logs in {data_dir / 'logs'}; Ctrl-C stops all", soft_wrap=True)
        fail(stack.wait())
    except LaunchError as error:
        fail(error)
    except KeyboardInterrupt:
        with err.status("stopping"):
            stack.stop()
        err.print("stopped")
    finally:
        stack.stop(grace_s=1.0)


@app.command(epilog="Example: loramux generate 'What is a volcano?' --adapter french --max-tokens 40")
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    adapter: Annotated[str | None, typer.Option("--adapter", "-a", help="Default: the base model.")] = None,
    revision: Annotated[str | None, typer.Option(help="Default: the adapter's newest.")] = None,
    alias: Annotated[str | None, typer.Option(help="Instead of a revision.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="As a user's message in the model's chat template, or as plain text.")
    ] = True,
    system: Annotated[str | None, typer.Option(help="A system message before it; only with --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens that make up this probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens at least this likely against the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Over 1: shun tokens of prompt and output.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Over 0: shun tokens of the output.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Over 0: the more, the oftener it came.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    priority: Annotated[Priority, typer.Option(help="Who waits for whom when it is busy.")] = "normal",
    timeout: Annotated[float | None, typer.Option(help="Seconds until it is given up.")] = None,
    gateway: Gateway = DEFAULT_GATEWAY,
    api_key: ApiKey = None,
) -> None:
    """Stream an answer to the terminal; figures about it go to stderr."""
    if system is not None and not chat:
        raise typer.BadParameter("needs --chat", param_hint="--system")
    text: Prompt = prompt
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        text = [*messages, {"role": "user", "content": prompt}]
    with reported(), Client(gateway, api_key=api_key) as client:
        started = time.monotonic()
        stream = client.generate(
            text,
            adapter=adapter,
            revision=revision,
            alias=alias,
            priority=priority,
            timeout_s=timeout,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            stop=stop or None,
            ignore_eos=ignore_eos or None,
        )
        first = None
        try:
            for delta in stream:
                first = first or time.monotonic()
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        finally:
            if first is not None:
                sys.stdout.write("\n")
                sys.stdout.flush()
        err.print(summary(stream, started, first, time.monotonic()), style="dim", soft_wrap=True)


@app.command(epilog="Example: loramux models --gateway localhost:50051")
def models(gateway: Gateway = DEFAULT_GATEWAY, api_key: ApiKey = None) -> None:
    """Show the base model, the adapters and the model servers, as the gateway knows them."""
    with reported(), Client(gateway, api_key=api_key) as client:
        known = client.models()
    out.print(f"{known.base_model or 'no model server has been ready yet'}, context {known.context_length}")
    rows = []
    for adapter in known.adapters:
        aliases = ", ".join(f"{name} → {short(revision)}" for name, revision in sorted(adapter.aliases.items()))
        rows.append((adapter.adapter_id, short(adapter.newest_revision), str(adapter.revisions), aliases))
    show_rows(("adapter", "newest", "revisions", "aliases"), rows)
    rows = []
    for replica in known.replicas:
        resident = ", ".join(f"{ref.adapter_id}@{short(ref.revision)}" for ref in replica.resident_adapters)
        state = "ready" if replica.ready else "away"
        rows.append((replica.address, state, str(replica.outstanding), resident))
    show_rows(("model server", "state", "outstanding", "adapters in memory"), rows)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _show_state(stack: Stack, status: Status, name: str, state: str) -> None:
    status.update(f"{name}: {state}")
    if state == "ready":
        err.print(f"{name} ready at {stack.addresses[name]}", soft_wrap=True)
