"""One choice's output on its way out: text, stop strings, counts and times."""

from __future__ import annotations

import time
from collections.abc import Sequence

from model_server import messages
from model_server.detokenizer import IncrementalDetokenizer
from model_server.request import Finish
from model_server.runner import Sampled
from model_server.stop import StopChecker
from model_server.tokenizer import Tokenizer
from protos import common_pb2, errors

_REASONS = {
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.EOS: common_pb2.FINISH_REASON_EOS,
}


class Answer:
    def __init__(self, choice: int, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int) -> None:
        self._choice = choice
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopChecker(stop, min_tokens)
        self._first_delta_s: float | None = None
        self.num_output = 0
        self.ended: messages.Ended | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was completed: nothing more belongs to the answer."""
        return self._stop.matched is not None

    def take(self, tokens: messages.Tokens) -> common_pb2.Delta:
        """The next tokens. Raises INTERNAL where some before them never came."""
        self._check_whole(tokens.index)
        if self._first_delta_s is None:
            self._first_delta_s = time.monotonic()
        delta = common_pb2.Delta(index=self.num_output, choice=self._choice)
        text = []
        for sampled in tokens.sampled:
            self.num_output += 1
            delta.token_ids.append(sampled.token_id)
            if sampled.logprob is not None:
                delta.logprobs.append(position_logprobs(sampled, sampled.logprob))
            text.append(self._stop.push(self._detokenizer.push((sampled.token_id,)), self.num_output))
            if self.stopped:
                break  # tokens past the stop string were computed but are not part of the answer
        delta.text = "".join(text)
        return delta

    def end(self, ended: messages.Ended) -> common_pb2.Delta | None:
        """The engine's last word. What was held back and turns out to be text after all: part of a stop string, or of a
        character. Raises INTERNAL where the last tokens never came."""
        self.ended = ended
        if self.stopped:
            return None
        self._check_whole(ended.num_output)
        text = self._stop.push(self._detokenizer.finish(), self.num_output) + self._stop.finish()
        return common_pb2.Delta(index=self.num_output, choice=self._choice, text=text) if text else None

    def choice_end(self) -> common_pb2.ChoiceEnd:
        assert self.ended is not None
        end = common_pb2.ChoiceEnd(output_tokens=self.num_output)
        if self._stop.matched is not None:
            end.reason = common_pb2.FINISH_REASON_STOP
            end.stop = self._stop.matched
        else:
            end.reason = _REASONS[self.ended.finish]
            if self.ended.stop_token_id is not None:
                end.stop_token_id = self.ended.stop_token_id
        return end

    def timings(self, arrived_s: float, gateway_queue_s: float) -> common_pb2.Timings:
        ended = self.ended
        # An answer has been scheduled and has a first token, or it would have failed before.
        assert ended is not None and ended.first_scheduled_s is not None and self._first_delta_s is not None
        assert ended.first_token_s is not None and ended.last_token_s is not None
        return common_pb2.Timings(
            gateway_queue_s=gateway_queue_s,
            engine_queue_s=ended.first_scheduled_s - arrived_s - ended.adapter_load_s,
            adapter_load_s=ended.adapter_load_s,
            prefill_s=ended.first_token_s - ended.first_scheduled_s,
            decode_s=ended.last_token_s - ended.first_token_s,
            time_to_first_token_s=self._first_delta_s - arrived_s,
            preemptions=ended.num_preemptions,
        )

    def _check_whole(self, num_output: int) -> None:
        # Text with a hole in it reads like an answer: better none.
        if num_output != self.num_output:
            raise errors.internal(f"{self.num_output} tokens arrived where the engine has sampled {num_output}")


def position_logprobs(sampled: Sampled, logprob: float) -> common_pb2.PositionLogprobs:
    top = [common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in sampled.top]
    return common_pb2.PositionLogprobs(logprob=logprob, top=top)
