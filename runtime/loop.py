"""The loop: owns the executor, runs one step after the other and carries out their results."""

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from llmbuild.errors import RequestError
from llmbuild.runtime.bucket import pad_to_bucket
from llmbuild.runtime.detokenizer import OutputText
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.sampling import SamplingParams, check_params, sample
from llmbuild.runtime.scheduler import Scheduler
from llmbuild.runtime.sequence import FinishReason, Sequence, SequenceId
from llmbuild.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one step added to a request; the last chunk has the finish reason.

    text can be empty while a character or a possible stop string is incomplete.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request and its results so far."""

    sequence: Sequence
    output: OutputText
    submitted_s: float  # time.perf_counter()
    chunks: deque[StreamChunk] = field(default_factory=deque)  # not yet taken by the reader
    texts: list[str] = field(default_factory=list)  # of all chunks
    ttft_ms: float | None = None  # submission to first token
    tpot_ms: float | None = None  # mean time of each token after the first
    error: str | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.sequence.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def emit(self, text: str, token_ids: tuple[int, ...]) -> None:
        self.texts.append(text)
        self.chunks.append(StreamChunk(text, token_ids, self.finish_reason))


class Loop:
    """Serves requests by inflight batching; for one thread at a time.

    However a request ends (EOS, stop string, length, cancel, error), it goes through `_finish`
    once, which frees its blocks.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        vocab_size: int,
        buckets: Items[int] = (),
    ) -> None:
        """buckets: decode batch sizes that steps are padded to, ascending."""
        self._executor = executor
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._buckets = buckets
        self._requests: dict[SequenceId, Request] = {}
        self._num_submitted = 0
        self._is_stepping = False
        self._cancelled: list[Request] = []  # during a step, to be ended after it

    @property
    def num_live(self) -> int:
        """Requests that haven't ended."""
        return len(self._requests)

    def submit(self, prompt_ids: Items[int], params: SamplingParams) -> Request:
        """Queue a request; raises RequestError if it is malformed or can never fit."""
        check_params(params)
        self._check_prompt(prompt_ids)
        self._scheduler.check_fits(len(prompt_ids), params.max_tokens)
        sequence = Sequence(
            id=SequenceId(self._num_submitted),
            tokens=[int(token_id) for token_id in prompt_ids],
            num_prompt_tokens=len(prompt_ids),
            params=params,
            rng=np.random.default_rng(params.seed),
        )
        self._num_submitted += 1
        request = Request(
            sequence=sequence,
            output=OutputText(self._tokenizer, params.stop),
            submitted_s=time.perf_counter(),
        )
        self._requests[sequence.id] = request
        self._scheduler.add(sequence)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; does nothing if it has ended."""
        if self._is_stepping:  # a reader that is collected as garbage can call in mid-step
            self._cancelled.append(request)
        elif request.finish_reason is None:
            self._finish(request, "cancelled", request.output.finish(), ())

    def cancel_all(self) -> None:
        for request in list(self._requests.values()):
            self.cancel(request)

    def step(self) -> bool:
        """Run one step; False if there is nothing to do.

        If the step fails, all live requests end with the error, and it is raised.
        """
        assert not self._is_stepping
        self._is_stepping = True
        try:
            return self._run_step()
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            self._is_stepping = False
            while self._cancelled:
                self.cancel(self._cancelled.pop())

    def check(self) -> None:
        self._scheduler.check()
        queued = {s.id for s in (*self._scheduler.running, *self._scheduler.waiting)}
        assert queued == set(self._requests), "a live request is in no queue"
        assert all(request.finish_reason is None for request in self._requests.values())

    def _run_step(self) -> bool:
        step = self._scheduler.schedule()
        if step is None:
            return False
        logits = self._executor.step(pad_to_bucket(step.batch, self._buckets))
        self._scheduler.advance(step)
        for sequence, row in zip(step.sampled, logits[: len(step.sampled)], strict=True):
            token_id = sample(row, sequence.params, sequence.rng)
            self._accept(self._requests[sequence.id], token_id)
        return True

    def _accept(self, request: Request, token_id: int) -> None:
        """Add a sampled token to its request, and end the request if it is the last."""
        sequence, params = request.sequence, request.sequence.params
        sequence.tokens.append(token_id)
        elapsed_ms = (time.perf_counter() - request.submitted_s) * 1e3
        if request.ttft_ms is None:
            request.ttft_ms = elapsed_ms
        else:
            request.tpot_ms = (elapsed_ms - request.ttft_ms) / (sequence.num_output_tokens - 1)
        reason: FinishReason | None = None
        if token_id in self._tokenizer.eos_ids and not params.ignore_eos:
            reason = "eos"
        elif sequence.num_output_tokens == params.max_tokens:
            reason = "length"
        text = "" if reason == "eos" else request.output.push(token_id)
        if reason is not None:
            text += request.output.finish()
        if request.output.is_stopped:  # by this token, or by text held back until the end
            reason = "stop"
        if reason is None:
            request.emit(text, (token_id,))
        else:
            self._finish(request, reason, text, (token_id,))

    def _finish(
        self, request: Request, reason: FinishReason, text: str, token_ids: tuple[int, ...]
    ) -> None:
        self._scheduler.finish(request.sequence)
        del self._requests[request.sequence.id]
        request.sequence.finish_reason = reason
        request.emit(text, token_ids)

    def _fail_all(self, error: BaseException) -> None:
        for request in list(self._requests.values()):
            request.error = str(error) or type(error).__name__
            self._finish(request, "error", request.output.finish(), ())

    def _check_prompt(self, prompt_ids: Items[int]) -> None:
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        for token_id in prompt_ids:
            is_int = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"prompt token {token_id!r} isn't a token id; ids are whole numbers from 0 "
                    f"to {self._vocab_size - 1}"
                )
