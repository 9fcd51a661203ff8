"""`python -m bench --help`."""

import os

from model_server.config import ENGINE_ENVIRONMENT

# The engine of this process's bench runs as it does under a model server.
os.environ.update(ENGINE_ENVIRONMENT | os.environ)

from bench.cli import main  # noqa: E402 -- after the environment is set: it brings torch

if __name__ == "__main__":
    main()
