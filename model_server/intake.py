"""From the wire to the engine's terms: prompt to token ids, sampling parameters with every default filled in.

What needs no model is checked in protos/validation.py, by the gateway and here alike; here is what needs tokenizer, vocabulary
and context length.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from model_server.request import AdapterRef, Sampling
from model_server.runner import RunnerInfo
from model_server.tokenizer import Tokenizer
from protos import common_pb2, errors, model_server_pb2, validation

_T = TypeVar("_T")
_PRIORITIES = {
    common_pb2.PRIORITY_UNSPECIFIED: 1,
    common_pb2.PRIORITY_LOW: 0,
    common_pb2.PRIORITY_NORMAL: 1,
    common_pb2.PRIORITY_HIGH: 2,
}
# Below this a prompt is tokenised at once; above, on a thread, so that it holds up no other stream.
_INLINE_CHARACTERS = 4096
# On the wire a token's log probability takes up to so many bytes; the echo of a prompt is one message.
_LOGPROB_BYTES = 12
_MAX_ECHO_BYTES = 3 * 2**20


@dataclass(frozen=True, slots=True)
class Parsed:
    prompt_ids: list[int]
    sampling: Sampling
    stop: tuple[str, ...]
    adapter: AdapterRef | None
    priority: int
    num_choices: int
    echo: bool


def parse_adapter(ref: common_pb2.AdapterRef) -> AdapterRef:
    """The message field "adapter". Raises INVALID_ARGUMENT naming the part of it that is wrong."""
    validation.check_adapter(ref)
    return AdapterRef(ref.adapter_id, ref.revision)


class Intake:
    def __init__(self, tokenizer: Tokenizer, info: RunnerInfo, default_max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._default_max_tokens = default_max_tokens

    async def parse(self, request: model_server_pb2.ServerGenerateRequest) -> Parsed:
        """Raises INVALID_ARGUMENT naming the first field that is wrong."""
        validation.check_prompt(request.prompt)
        validation.check_sampling(request.sampling)
        validation.check_priority(request.priority)
        adapter = None
        if request.HasField("adapter"):
            adapter = parse_adapter(request.adapter)
        prompt_ids = await self._tokenize(request.prompt)
        sampling = self._sampling(request.sampling, len(prompt_ids))
        return Parsed(
            prompt_ids=prompt_ids,
            sampling=sampling,
            stop=tuple(request.sampling.stop),
            adapter=adapter,
            priority=_PRIORITIES[request.priority],
            num_choices=max(1, request.sampling.n),
            echo=request.sampling.echo,
        )

    async def _tokenize(self, prompt: common_pb2.Prompt) -> list[int]:
        field = f"prompt.{prompt.WhichOneof('kind')}"
        if prompt.HasField("token_ids"):
            ids = list(prompt.token_ids.ids)
        elif prompt.HasField("chat"):
            messages = [{"role": m.role, "content": m.content} for m in prompt.chat.messages]
            ids = await _sized(prompt.chat.ByteSize(), self._tokenizer.encode_chat, messages)
        else:
            ids = await _sized(len(prompt.text), self._tokenizer.encode, prompt.text)
        if not ids:
            raise errors.invalid_argument(field, "gives no tokens")
        if len(ids) >= self._info.context_length:
            raise errors.invalid_argument(
                field,
                f"{len(ids)} tokens leave no room for output in the context length of {self._info.context_length} tokens",
            )
        # A tokenizer, too, can know tokens that the model's embedding does not hold.
        if max(ids) >= self._info.vocab_size:
            index = next(i for i, token_id in enumerate(ids) if token_id >= self._info.vocab_size)
            raise errors.invalid_argument(
                f"{field}.ids[{index}]" if prompt.HasField("token_ids") else field,
                f"token {ids[index]} is outside the model's vocabulary of {self._info.vocab_size} tokens",
            )
        return ids

    def _sampling(self, params: common_pb2.SamplingParams, num_prompt: int) -> Sampling:
        room = self._info.context_length - num_prompt
        max_tokens = params.max_tokens if params.HasField("max_tokens") else min(room, self._default_max_tokens)
        if max_tokens > room:
            raise errors.invalid_argument(
                "sampling.max_tokens",
                f"{max_tokens} with a prompt of {num_prompt} tokens exceeds the context length of "
                f"{self._info.context_length} tokens",
            )
        if params.min_tokens > max_tokens:
            raise errors.invalid_argument(
                "sampling.min_tokens", f"{params.min_tokens} is more than the {max_tokens} tokens it may generate"
            )
        if params.HasField("prompt_logprobs"):
            num_bytes = num_prompt * (1 + params.prompt_logprobs) * _LOGPROB_BYTES
            if num_bytes > _MAX_ECHO_BYTES:
                raise errors.invalid_argument(
                    "sampling.prompt_logprobs", f"{params.prompt_logprobs} for {num_prompt} tokens exceed a message"
                )
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids:
                if token_id >= self._info.vocab_size:
                    raise errors.invalid_argument(
                        f"sampling.{name}", f"{token_id} is outside the vocabulary of {self._info.vocab_size} tokens"
                    )
        return Sampling(
            max_tokens=max_tokens,
            temperature=params.temperature,
            top_p=params.top_p if params.HasField("top_p") else 1.0,
            top_k=params.top_k,
            min_p=params.min_p,
            # The engine's generator takes 63 bits.
            seed=(params.seed if params.HasField("seed") else secrets.randbits(63)) & (2**63 - 1),
            repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple(params.logit_bias.items()),
            stop_token_ids=frozenset(params.stop_token_ids),
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs if params.HasField("logprobs") else None,
            prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        )


async def _sized(num_characters: int, function: Callable[[_T], list[int]], argument: _T) -> list[int]:
    return function(argument) if num_characters <= _INLINE_CHARACTERS else await asyncio.to_thread(function, argument)
