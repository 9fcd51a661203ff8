from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model_server.weights import ModelFiles, open_model
from model_server.weights.huggingface import HuggingFaceDirectory
from tests.model_server.tiny import TinyModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are tiny: on a busy machine two threads wait for each other far longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """The real model, opened once."""
    return open_model("smollm2")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def files(tiny: TinyModel) -> HuggingFaceDirectory:
    return HuggingFaceDirectory(tiny.directory)
