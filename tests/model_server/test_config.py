"""What cannot be is refused where the configuration is read, by the names of its fields."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from model_server.config import Config


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weight_dtype": "int8", "device": "cuda"}, "weight_dtype: 'int8' needs device 'cpu'"),
        ({"weight_dtype": "int8", "dtype": "float16"}, "weight_dtype: 'int8' needs dtype 'float32' or 'bfloat16'"),
        ({"max_batch_tokens": 8, "max_running": 9}, r"max_batch_tokens \(8\) is below max_running \(9\)"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, str | int], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Config.model_validate(settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_weights_go_with_what_the_kernels_know(dtype: str) -> None:
    assert Config.model_validate({"weight_dtype": "int8", "dtype": dtype}).weight_dtype == "int8"
