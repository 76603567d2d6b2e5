"""The loop: owns the executor, runs one step after the other and carries out their results."""

import time
from collections import deque
from collections.abc import Sequence as Items

import msgspec

from llmbuild.errors import InternalError, RequestError
from llmbuild.runtime.bucket import pad_to_bucket
from llmbuild.runtime.detokenizer import OutputText
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.params import SamplingParams, check_params, is_whole
from llmbuild.runtime.scheduler import Scheduler, Step
from llmbuild.runtime.sequence import FinishReason, Sequence, SequenceId, State
from llmbuild.runtime.tokenizer import Tokenizer

# Decode steps that the executor may run in one call. Python's work between calls is then small
# beside them, and streams and new requests still wait for no more than CALL_S.
MAX_STEPS = 8
CALL_S = 0.02


class StreamChunk(msgspec.Struct, frozen=True):
    """What one call of the executor added to a request: the tokens of one step or of a few. The
    last chunk has the finish reason.

    text can be empty while a character or a possible stop string is incomplete.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class Request(msgspec.Struct, eq=False):
    """A request and its results so far."""

    sequence: Sequence
    output: OutputText
    submitted_s: float  # time.perf_counter(), as all times here
    chunks: deque[StreamChunk] = msgspec.field(default_factory=deque)  # not yet taken
    texts: list[str] = msgspec.field(default_factory=list)  # of all chunks
    first_token_s: float | None = None
    last_token_s: float | None = None
    error: str | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.sequence.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft_ms(self) -> float | None:
        """Submission to first token."""
        return None if self.first_token_s is None else (self.first_token_s - self.submitted_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of each token after the first."""
        later_tokens = self.sequence.num_output_tokens - 1
        if self.first_token_s is None or self.last_token_s is None or later_tokens < 1:
            return None
        return (self.last_token_s - self.first_token_s) * 1e3 / later_tokens

    def emit(self, text: str, token_ids: tuple[int, ...]) -> None:
        self.texts.append(text)
        self.chunks.append(StreamChunk(text, token_ids, self.sequence.finish_reason))


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
        call_s: float = CALL_S,
    ) -> None:
        """buckets: decode batch sizes that steps are padded to, ascending. call_s: about how long
        a call of the executor may take that runs several steps."""
        self._executor = executor
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._buckets = buckets
        self._call_s = call_s
        self._max_steps = 1  # of the next call
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
        )
        if params.temperature > 0:
            # It imports numpy, which takes longer than a load, and greedy requests go without.
            from llmbuild.runtime.sampling import make_rng

            sequence.rng = make_rng(params.seed)
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
        step = self._scheduler.schedule(self._max_steps)
        if step is None:
            return False
        rows = self._execute(step)
        self._scheduler.advance(step)
        now_s = time.perf_counter()
        for sequence, token_ids in zip(step.sampled, rows, strict=True):
            self._accept(self._requests[sequence.id], token_ids, now_s)
        return True

    def _execute(self, step: Step) -> Items[list[int]]:
        """The tokens of each sampled sequence, one of each step; as step_greedy gives them."""
        batch = pad_to_bucket(step.batch, self._buckets)
        if not step.is_greedy:
            from llmbuild.runtime.sampling import sample

            logits = self._executor.step(batch)
            return [
                [sample(row, sequence.params, sequence.rng)]
                for row, sequence in zip(logits, step.sampled, strict=False)
            ]
        start_s = time.perf_counter()
        rows = self._executor.step_greedy(batch, step.num_steps)
        step_s = (time.perf_counter() - start_s) / step.num_steps
        self._max_steps = max(1, int(min(MAX_STEPS, self._call_s / max(step_s, 1e-9))))
        return rows[: len(step.sampled)]

    def _accept(self, request: Request, token_ids: list[int], now_s: float) -> None:
        """Add sampled tokens to their request. The first that ends it is its last: what was
        computed past that is dropped."""
        sequence, params, output = request.sequence, request.sequence.params, request.output
        remaining = params.max_tokens - sequence.num_output_tokens
        eos_ids = frozenset() if params.ignore_eos else self._tokenizer.eos_ids
        reason: FinishReason | None = None
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            if token_id < 0:
                raise InternalError(
                    f"the logit of token {~token_id} isn't a finite number: the step went wrong"
                )
            if token_id in eos_ids:
                reason = "eos"
                text += output.finish()
            else:
                text += output.push(token_id)
                if count == remaining:
                    reason = "length"
                    text += output.finish()
            if output.is_stopped:  # by this token, or by text held back until the end
                reason = "stop"
            if reason is not None:
                token_ids = token_ids[:count]
                break
        sequence.tokens += token_ids
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        if reason is None:
            request.emit(text, tuple(token_ids))
        else:
            self._finish(request, reason, text, tuple(token_ids))

    def _finish(
        self, request: Request, reason: FinishReason, text: str, token_ids: tuple[int, ...]
    ) -> None:
        self._scheduler.finish(request.sequence)
        del self._requests[request.sequence.id]
        request.sequence.finish_reason = reason
        request.emit(text, token_ids)

    def _fail_all(self, error: BaseException) -> None:
        """End every request and begin anew: an interrupt can have come anywhere in the step, and
        have left queues and blocks half changed."""
        self._scheduler.reset()
        failed, self._requests = self._requests, {}
        for request in failed.values():
            request.error = str(error) or type(error).__name__
            request.sequence.state = State.FINISHED
            request.sequence.finish_reason = "error"
            request.emit(request.output.finish(), ())

    def _check_prompt(self, prompt_ids: Items[int]) -> None:
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        for token_id in prompt_ids:
            if not is_whole(token_id) or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"prompt token {token_id!r} isn't a token id; ids are whole numbers from 0 "
                    f"to {self._vocab_size - 1}"
                )
