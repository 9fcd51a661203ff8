"""Sampling in plain torch: the definition, and what the CPU runner uses.

Order, as in vLLM: logit bias, penalties, temperature, min-p, top-k, top-p (of what min-p and top-k left), draw.

Every filter is a threshold on a token's weight exp((logit - max) / temperature), so tokens of equal weight stand or
fall together and no result depends on the order of a sort. The draw inverts the distribution function, in token id
order, at one uniform number per row that depends on the row's seed and position alone. Rows are computed one by one:
a row's result cannot depend on its neighbours, not even through the shape of a reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layouts import check, check_index

# Sums run over tiles of this many tokens, then over tiles: cheaper than a running sum over the vocabulary.
_TILE = 256
# Candidates first looked at for top-p; most distributions reach 0.95 within them, and a full sort costs 50 times more.
_NUCLEUS_GUESS = 256
_MASK = 0xFFFFFFFF


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Draw one token per row of `logits` [R, V] fp32 (finite or -inf, not changed) -> ids [R] int64.

    `temperature` [R] fp32: 0 takes the largest logit, of equals the lowest id. `top_k` [R] int32: 0, or V and more, is
    off. `top_p` [R] fp32: 1 is off. `min_p` [R] fp32: 0 is off. `seed` [R] int64 and `position` [R] int32 (the output
    token's, in its request) select the row's random number. Raises ValueError for other shapes or dtypes.
    """
    check_sample_arguments(logits, temperature, top_k, top_p, min_p, seed, position)
    ids = logits.argmax(dim=-1)  # torch's argmax takes the first of equals
    parameters = (tensor.tolist() for tensor in (temperature, top_k, top_p, min_p, seed, position))
    for row, (t, k, p, floor, row_seed, row_position) in enumerate(zip(*parameters, strict=True)):
        if t > 0.0:
            weights = _weights(logits[row], t)
            threshold = _threshold(weights, k if k < logits.shape[1] else 0, p, floor)
            if threshold > 0.0:
                weights.masked_fill_(weights < threshold, 0.0)
            index = _invert(weights, uniform(row_seed, row_position))
            if index is not None:
                ids[row] = index
    return ids


def apply_penalties(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    prompt_ids: Tensor,
    prompt_indptr: Tensor,
    output_ids: Tensor,
    output_indptr: Tensor,
) -> None:
    """Penalise in place what `logits` [R, V] fp32 would repeat; `repetition`, `presence`, `frequency` [R] fp32.

    A token seen in prompt or output: logit / repetition if positive, * repetition if not (1 is off). Then, by its count
    in the output: logit -= frequency * count + presence * (count > 0) (0 is off). Row r's tokens are
    `prompt_ids[prompt_indptr[r] : prompt_indptr[r + 1]]` (ids int64, indptr [R + 1] int32), the output's likewise; ids
    outside the vocabulary are ignored.
    """
    check_penalty_arguments(
        logits, repetition, presence, frequency, prompt_ids, prompt_indptr, output_ids, output_indptr
    )
    prompt_starts, output_starts = prompt_indptr.tolist(), output_indptr.tolist()
    rows = zip(repetition.tolist(), presence.tolist(), frequency.tolist(), strict=True)
    for row, (factor, present, frequent) in enumerate(rows):
        line = logits[row]
        output = _within(output_ids[output_starts[row] : output_starts[row + 1]], line.numel())
        if factor != 1.0:
            prompt = _within(prompt_ids[prompt_starts[row] : prompt_starts[row + 1]], line.numel())
            seen = torch.cat([prompt, output]).unique()
            values = line[seen]
            line[seen] = torch.where(values > 0, values / factor, values * factor)
        if present != 0.0 or frequent != 0.0:
            ids, counts = output.unique(return_counts=True)
            line[ids] -= frequent * counts + present


def apply_bias(logits: Tensor, ids: Tensor, values: Tensor, indptr: Tensor) -> None:
    """logits[r, ids[i]] += values[i] in place for i in indptr[r] to indptr[r + 1]; a row's ids are distinct.

    `logits` [R, V] fp32, `ids` [N] int64, `values` [N] fp32 (-inf forbids a token), `indptr` [R + 1] int32; ids outside
    the vocabulary are ignored.
    """
    check_bias_arguments(logits, ids, values, indptr)
    counts = indptr.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=logits.device), counts)
    inside = (ids >= 0) & (ids < logits.shape[1])
    logits.index_put_((rows[inside], ids[inside]), values[inside], accumulate=True)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 bits: the first word of Philox 4x32-10, key `seed` (64 bits), counter `position`."""
    key_0, key_1 = seed & _MASK, (seed >> 32) & _MASK
    c_0, c_1, c_2, c_3 = position & _MASK, 0, 0, 0
    for _ in range(10):
        product_0, product_2 = c_0 * 0xD2511F53, c_2 * 0xCD9E8D57
        c_0, c_1 = (product_2 >> 32) ^ c_1 ^ key_0, product_2 & _MASK
        c_2, c_3 = (product_0 >> 32) ^ c_3 ^ key_1, product_0 & _MASK
        key_0, key_1 = (key_0 + 0x9E3779B9) & _MASK, (key_1 + 0xBB67AE85) & _MASK
    return float(c_0 >> 8) * 2.0**-24


def check_sample_arguments(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> None:
    """What `sample` refuses, here and in Triton."""
    _check_logits(logits)
    rows = (logits.shape[0],)
    for name, tensor in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        _check_values(name, tensor, rows)
    for name, tensor in (("top_k", top_k), ("position", position)):
        check_index(name, tensor, rows)
    check(seed.dtype == torch.int64 and tuple(seed.shape) == rows, f"seed: want int64 of shape {rows}")


def check_penalty_arguments(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    prompt_ids: Tensor,
    prompt_indptr: Tensor,
    output_ids: Tensor,
    output_indptr: Tensor,
) -> None:
    """What `apply_penalties` refuses, here and in Triton."""
    _check_logits(logits)
    rows = logits.shape[0]
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        _check_values(name, tensor, (rows,))
    for name, ids, indptr in (("prompt", prompt_ids, prompt_indptr), ("output", output_ids, output_indptr)):
        check(ids.dtype == torch.int64 and ids.dim() == 1, f"{name}_ids: want int64 of one dimension")
        check_index(f"{name}_indptr", indptr, (rows + 1,))


def check_bias_arguments(logits: Tensor, ids: Tensor, values: Tensor, indptr: Tensor) -> None:
    """What `apply_bias` refuses, here and in Triton."""
    _check_logits(logits)
    check(ids.dtype == torch.int64 and ids.dim() == 1, "ids: want int64 of one dimension")
    _check_values("values", values, tuple(ids.shape))
    check_index("indptr", indptr, (logits.shape[0] + 1,))


def _check_logits(logits: Tensor) -> None:
    check(logits.dim() == 2 and logits.shape[1] > 0, f"logits: shape {tuple(logits.shape)}, want [R, V > 0]")
    check(logits.dtype == torch.float32, f"logits: dtype {logits.dtype}, want float32")
    check(logits.stride(1) == 1, "logits: rows must be contiguous")


def _check_values(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    check(tensor.dtype == torch.float32, f"{name}: dtype {tensor.dtype}, want float32")
    check(tuple(tensor.shape) == shape, f"{name}: shape {tuple(tensor.shape)}, want {shape}")
    check(tensor.is_contiguous(), f"{name}: must be contiguous")


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """exp((logits - max) / temperature) [V], padded with zeros to whole tiles. The largest weight is exactly 1.

    The maximum is taken off before the division, so that no temperature, however small, overflows.
    """
    vocabulary = logits.numel()
    weights = logits.new_zeros(-(-vocabulary // _TILE) * _TILE)
    inner = weights[:vocabulary]
    torch.sub(logits, logits.max(), out=inner)
    inner.div_(temperature).exp_()
    return weights


def _threshold(weights: Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """The least weight that passes all filters; `top_k` 0 is off."""
    threshold = min_p
    if top_k > 0:
        threshold = max(threshold, float(weights.topk(top_k, sorted=False).values.min()))
    if top_p < 1.0:
        kept = weights.masked_fill(weights < threshold, 0.0) if threshold > 0.0 else weights
        wanted = top_p * float(_tile_sums(kept).sum())
        size = min(max(top_k, _NUCLEUS_GUESS), weights.numel())
        while True:
            candidates = kept.topk(size).values
            mass = candidates.double().cumsum(0)
            if float(mass[-1]) >= wanted or size == weights.numel():
                break
            size = min(size * 16, weights.numel())
        # The last candidate needed: what stands before it sums to less than `wanted`.
        last = min(int(torch.searchsorted(mass, wanted)), size - 1)
        threshold = max(threshold, float(candidates[last]))
    return threshold


def _invert(weights: Tensor, u: float) -> int | None:
    """The first token at which the running sum of `weights` exceeds u * total; None when all are zero or NaN."""
    tiles = _tile_sums(weights).cumsum(0)
    total = float(tiles[-1])
    if not total > 0.0:
        return None
    target = u * total
    tile = int(torch.searchsorted(tiles, target, right=True))
    before = float(tiles[tile - 1]) if tile > 0 else 0.0
    inside = weights[tile * _TILE : (tile + 1) * _TILE]
    index = int(torch.searchsorted(inside.double().cumsum(0), target - before, right=True))
    if index == _TILE or inside[index] == 0.0:  # the two sums may differ in the last bit
        index = int(inside.nonzero()[-1])
    return tile * _TILE + index


def _tile_sums(weights: Tensor) -> Tensor:
    return weights.view(-1, _TILE).sum(dim=1).double()


def _within(ids: Tensor, vocabulary: int) -> Tensor:
    return ids[(ids >= 0) & (ids < vocabulary)]
