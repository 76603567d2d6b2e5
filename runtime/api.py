"""`LLM`: an engine in this process, for whole completions and for streams."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeGuard, overload

from llmbuild.errors import RequestError, UserError
from llmbuild.runtime.chat import Message, load_chat_template
from llmbuild.runtime.executors.open import RANK_TIMEOUT_S, check_rank_timeout, open_executor
from llmbuild.runtime.interrupts import deferred_interrupts
from llmbuild.runtime.kv.manager import KVManager
from llmbuild.runtime.kv.pool import BlockPool
from llmbuild.runtime.kv.sizing import choose_num_blocks, kv_bytes
from llmbuild.runtime.lock import FairLock
from llmbuild.runtime.loop import Loop, Request, StreamChunk
from llmbuild.runtime.params import SamplingParams
from llmbuild.runtime.scheduler import Scheduler
from llmbuild.runtime.sequence import FinishReason
from llmbuild.runtime.threads import check_num_threads, check_pinning
from llmbuild.runtime.tokenizer import load_tokenizer

__all__ = ["LLM", "Completion", "SamplingParams", "Stream", "StreamChunk"]

Prompt: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request that has ended.

    token_ids: all that was generated, with the EOS token or the tokens of a stop string; text
    is without these. finish_reason "refused" or "error" comes with the error's text.
    ttft_ms: submission to first token, None if there was none. tpot_ms: mean time of each token
    after the first, None if there was none.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | Literal["refused"]
    error: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    num_preemptions: int = 0


class LLM:
    """An engine, opened: weights mapped, KV memory taken. Safe to use from several threads.

    Requests of all threads and streams share the engine's steps. Each waiting caller drives
    them; there is no thread in the background.
    """

    def __init__(
        self,
        engine_dir: str | os.PathLike[str],
        *,
        kv_memory: int | str | None = None,
        num_blocks: int | None = None,
        num_threads: int | None = None,
        pin_threads: bool | None = None,
        chunk_tokens: int | None = None,
        rank_timeout_s: float = RANK_TIMEOUT_S,
    ) -> None:
        """Raises EngineError if the engine is refused, UserError for a bad option.

        kv_memory (bytes, or text such as "512MiB") or num_blocks (the scratch block counted)
        states the KV memory; by default it is enough for max_sequences of full length, within
        256 MiB (4 GiB on a GPU). num_threads: by default the processors that this process may use.
        pin_threads: whether each keeps to a processor of its own while it computes; by default
        if they are as many as the processors. chunk_tokens: most tokens of one sequence in a
        step; by default the engine's limit.

        An engine of several ranks (docs/parallel.md) has a process for each, and num_threads and
        the processors are those of one. rank_timeout_s: how long a rank may keep the others
        waiting before it is given up. Where a launcher has started a process for each rank, this
        serves rank 0 on all others, and raises SystemExit when that has closed.
        """
        from llmbuild.runtime.engine import opening_engine

        check_num_threads(num_threads)
        check_pinning(pin_threads)
        check_rank_timeout(rank_timeout_s)
        if chunk_tokens is not None:
            _check_positive("chunk_tokens", chunk_tokens)
        with opening_engine(Path(engine_dir)) as engine:
            self.manifest = manifest = engine.manifest
            self.num_blocks = choose_num_blocks(manifest, kv_memory, num_blocks)
            self._tokenizer = load_tokenizer(engine.root)
            self._chat_template = load_chat_template(engine.root, self._tokenizer)
        manager = KVManager(BlockPool(self.num_blocks), manifest.kv.block_size)
        scheduler = Scheduler(manifest.limits, manager, chunk_tokens)
        # Last of what can fail, so that no rank's process is left without an LLM.
        self._executor = open_executor(
            *(engine, self.num_blocks, num_threads, pin_threads), rank_timeout_s=rank_timeout_s
        )
        self._loop = Loop(
            self._executor,
            scheduler,
            self._tokenizer,
            manifest.vocab_size,
            manifest.buckets,
        )
        # Reentrant, because a stream can be collected as garbage while its thread holds it.
        self._lock = FairLock()
        self._is_closed = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV memory that all ranks hold, the scratch block included."""
        return kv_bytes(self.manifest, self.num_blocks)

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Complete a prompt (text, or a list of token ids), or a list of prompts together.

        params: one for all, or a list with one for each. A single prompt that is refused raises
        RequestError; in a list it becomes a Completion with finish_reason "refused" while the
        others go on.
        """
        if isinstance(prompts, str) or _is_token_ids(prompts):
            if isinstance(params, Sequence):
                raise RequestError(
                    f"params is a list of {len(params)} but there is one prompt; give one "
                    "SamplingParams"
                )
            return self._complete_one(prompts, params)
        if not isinstance(prompts, list | tuple):
            raise RequestError(
                f"prompts must be text, token ids or a list of these, got {type(prompts).__name__}"
            )
        each = _params_of_each(len(prompts), params)
        outcomes: list[Request | Completion] = []
        try:
            with deferred_interrupts():  # or a request could be in the loop and not in the list
                for prompt, own in zip(prompts, each, strict=True):
                    outcomes.append(self._submit_or_refuse(prompt, own))
            requests = [outcome for outcome in outcomes if isinstance(outcome, Request)]
            self._drive(requests)
        finally:
            with deferred_interrupts():
                for outcome in outcomes:
                    if isinstance(outcome, Request):
                        self._release(outcome)
        return [_completion(o) if isinstance(o, Request) else o for o in outcomes]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Completion:
        """The model's answer to a conversation; raises RequestError if it is refused.

        tools: JSON schemas of the functions that the model may call, where its template has room
        for them.
        """
        return self._complete_one(self.chat_token_ids(messages, tools=tools), params)

    def chat_token_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt that a conversation becomes, for `generate` or `stream`.

        The template alone says where special tokens stand, so none are added.
        """
        text = self._chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return self._tokenizer.encode(text, with_bos=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> "Stream":
        """The completion of one prompt as it grows; raises RequestError if it is refused.

        Several streams can be read in turn by one thread. Closing one ends its request.
        """
        with deferred_interrupts():
            return Stream(self, self._submit(prompt, params))

    def close(self) -> None:
        """Cancel what is live and give all memory back; a second call does nothing."""
        with self._lock, deferred_interrupts():
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._loop.cancel_all()
            finally:
                self._executor.close()

    def check(self) -> None:
        """Assert the invariants of the loop, the scheduler and the KV memory."""
        with self._lock, deferred_interrupts():
            self._loop.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _complete_one(self, prompt: object, params: object) -> Completion:
        requests: list[Request] = []
        try:
            with deferred_interrupts():
                requests.append(self._submit(prompt, params))
            self._drive(requests)
        finally:
            with deferred_interrupts():
                for request in requests:
                    self._release(request)
        return _completion(requests[0])

    def _submit(self, prompt: object, params: object) -> Request:
        """Queue a request, whatever the caller gave; raises RequestError."""
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r}; give a SamplingParams")
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise RequestError(
                f"a prompt is text or a list of token ids, got {type(prompt).__name__}"
            )
        with self._lock, deferred_interrupts():
            if self._is_closed:
                raise UserError("this LLM is closed; open the engine again")
            return self._loop.submit(prompt, params)

    def _submit_or_refuse(self, prompt: object, params: object) -> Request | Completion:
        try:
            return self._submit(prompt, params)
        except RequestError as error:
            return Completion(
                prompt_token_ids=(),
                token_ids=(),
                text="",
                finish_reason="refused",
                error=str(error),
            )

    def _drive(self, requests: Sequence[Request]) -> None:
        """Run steps until all of `requests` have ended, whoever ends them."""
        for request in requests:
            while request.finish_reason is None:
                with self._lock, deferred_interrupts():
                    if request.finish_reason is None:
                        self._loop.step()

    def _next_chunk(self, request: Request) -> StreamChunk | None:
        """Run steps until the request has a chunk; None after its last one."""
        while True:
            with self._lock, deferred_interrupts():
                if request.chunks:
                    return request.chunks.popleft()
                if request.finish_reason is not None:
                    return None
                self._loop.step()

    def _release(self, request: Request) -> None:
        """Cancel a request unless it has ended."""
        with self._lock, deferred_interrupts():
            self._loop.cancel(request)


class Stream(Iterator[StreamChunk]):
    """The chunks of one request; reading drives the engine.

    Closing it (or leaving its `with`, or dropping it) cancels a request that hasn't ended, and
    frees its blocks. A step that fails raises in the reader that drove it; other readers get a
    chunk with finish_reason "error".
    """

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm = llm
        self._request = request
        self._is_closed = False

    def __next__(self) -> StreamChunk:
        chunk = None if self._is_closed else self._llm._next_chunk(self._request)
        if chunk is None:
            raise StopIteration
        return chunk

    @property
    def completion(self) -> Completion | None:
        """The whole result, once the request has ended."""
        return None if self._request.finish_reason is None else _completion(self._request)

    def close(self) -> None:
        self._is_closed = True
        self._llm._release(self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _completion(request: Request) -> Completion:
    sequence = request.sequence
    assert sequence.finish_reason is not None
    return Completion(
        prompt_token_ids=tuple(sequence.tokens[: sequence.num_prompt_tokens]),
        token_ids=sequence.output_ids,
        text=request.text,
        finish_reason=sequence.finish_reason,
        error=request.error,
        ttft_ms=request.ttft_ms,
        tpot_ms=request.tpot_ms,
        num_preemptions=sequence.num_preemptions,
    )


def _is_token_ids(prompts: object) -> TypeGuard[list[int]]:
    """True for a list of numbers, which is one prompt; an empty list is no prompts."""
    return (
        isinstance(prompts, list | tuple)
        and len(prompts) > 0
        and all(isinstance(item, int | Integral) for item in prompts)
    )


def _params_of_each(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise RequestError(f"params is {params!r}; give a SamplingParams or a list of them")
    if len(params) != count:
        raise RequestError(
            f"params has {len(params)} entries for {count} prompts; give one for each, or "
            "one SamplingParams for all"
        )
    return params


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} is {value!r}; it must be a whole number >= 1")
