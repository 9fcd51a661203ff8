"""A child process that answers each line of JSON with one, and may print what it likes on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TAIL_LINES = 15
_STOP_S = 20.0


class LineProcess:
    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        log_path: Path,
        *,
        stopped_between: bool = False,
    ) -> None:
        """`environment` is added to ours, less PYTHONPATH; stderr goes to `log_path`. Runs in that file's folder.

        `stopped_between` questions it and its own children get no time: one that polls while it waits would take it from
        whoever is measured meanwhile."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._log_path = log_path
        self._stopped_between = stopped_between
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**inherited, **environment},
                cwd=log_path.parent,
                text=True,
                # A group, not a session of its own: should we be killed while it is stopped, the kernel ends it.
                process_group=0,
            )

    def ask(self, message: Any) -> Any:
        """Raises RuntimeError with the end of its log when the process ends instead of answering."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            tail = "\n".join(self._log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise RuntimeError(f"{self._log_path.stem} ended with status {self._process.returncode}:\n{tail}")
        if self._stopped_between:
            self._signal(signal.SIGSTOP)
        return json.loads(line)

    def stop(self) -> None:
        """Close its input, which ends it; by force, with its children, if it does not end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # of a question that it never read
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)  # and whoever of its children is left
        self._process.wait()
        self._process.stdout.close()

    def _signal(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)
