"""`kernels` is also a package on the registry that transformers probes for: ours must not be taken for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBE = """
import kernels
import transformers, transformers.models.llama.modeling_llama
import peft
assert not hasattr(kernels, "__version__")
print(kernels.__file__)
"""


def test_transformers_and_peft_import_beside_it() -> None:
    result = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.splitlines()[-1]) == ROOT / "kernels" / "__init__.py"
