"""The repetition penalty is that of transformers. Not beside the other tests of kernels: those run without it on a bare GPU."""

import torch
import transformers

from kernels.reference import sampling as reference
from tests.kernels.test_penalties import V, penalty_arguments


def test_repetition_is_that_of_transformers() -> None:
    logits = torch.randn((1, V), generator=torch.Generator().manual_seed(0))
    prompt, output = [1, 2, 2, 5], [5, 7, 7]
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    want = processor(torch.tensor([prompt + output]), logits.clone())
    call = penalty_arguments([(1.3, 0.0, 0.0)], [prompt], [output], logits.device)
    reference.apply_penalties(logits, *call)
    torch.testing.assert_close(logits, want)
