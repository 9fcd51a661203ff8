"""`python -m kernels.gpu_check` from the repository root: the kernels' tests on this GPU, then the benchmark.

Needs torch, triton, numpy and pytest; no network, no installation of the project. Under five minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import torch


def main(environment: Mapping[str, str]) -> int:
    if not torch.cuda.is_available():
        print("No GPU here: `make test` runs these tests in Triton's interpreter.")
        return 1
    environment = {**environment, "TRITON_INTERPRET": "0", "PYTHONPATH": "."}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/kernels"]
    # The properties need hypothesis; test_compile is about GPUs that are not here.
    tests += ["--ignore-glob=*_properties.py", "--ignore=tests/kernels/test_compile.py", "tests/kernels"]
    tests_status = subprocess.run(tests, env=environment, check=False).returncode
    bench_status = subprocess.run([sys.executable, "-m", "kernels.bench"], env=environment, check=False).returncode
    return tests_status or bench_status


if __name__ == "__main__":
    sys.exit(main(os.environ))
