"""`python -m bench --help`."""

import os

from model_server.config import ENGINE_ENVIRONMENT

# The engine of this process's bench runs as it does under a model server.
os.environ.update(ENGINE_ENVIRONMENT | os.environ)

from bench.cli import main

if __name__ == "__main__":
    main()
