"""`llmbuild generate`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmbuild.errors import RequestError

if TYPE_CHECKING:
    from llmbuild.runtime.api import LLM, Completion, Stream


@click.command("generate")
@click.argument("engine_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("prompt", metavar="PROMPT")
@click.option("--chat", is_flag=True, help="PROMPT is a user's message, put in the chat template.")
@click.option("--system", default=None, metavar="TEXT", help="With --chat: the system's message.")
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", default=0, show_default=True, help="Sample of so many tokens; 0 of all.")
@click.option("--top-p", default=1.0, show_default=True, help="Sample of this much probability.")
@click.option("--seed", type=int, default=None, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option(
    "--kv-memory",
    default=None,
    metavar="SIZE",
    help="Memory for the KV cache, as in 512MiB.  [default: what the limits need, up to 256MiB, or "
    "4GiB of a GPU's]",
)
@click.option(
    "--threads",
    type=int,
    default=None,
    help="Threads that compute.  [default: the processors it may use]",
)
@click.option(
    "--pin/--no-pin",
    default=None,
    help="Keep each thread on a processor of its own.  [default: if there are as many]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the completion as one JSON object.")
def generate_command(
    engine_dir: Path,
    prompt: str,
    chat: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    kv_memory: str | None,
    threads: int | None,
    pin: bool | None,
    as_json: bool,
) -> None:
    """Complete PROMPT with the engine DIR.

    The text is printed as it comes, and the time it took on standard error. Sampling options
    need a temperature above 0.
    """
    from llmbuild.runtime.api import LLM, SamplingParams

    if temperature == 0:
        _refuse_sampling({"top-k": top_k != 0, "top-p": top_p != 1, "seed": seed is not None})
    if system is not None and not chat:
        raise RequestError("--system is a message of a chat; give --chat too")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
    )
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    with LLM(engine_dir, kv_memory=kv_memory, num_threads=threads, pin_threads=pin) as llm:
        tokens_or_text = llm.chat_token_ids(messages) if chat else prompt
        with llm.stream(tokens_or_text, params) as stream:
            if as_json:
                _print_json(llm, stream)
            else:
                for chunk in stream:
                    click.echo(chunk.text, nl=False)
                click.echo()
                click.echo(_speed(stream.completion), err=True)


def _speed(completion: "Completion | None") -> str:
    """How many tokens came, and how fast, in one line."""
    assert completion is not None
    tokens = f"{len(completion.token_ids)} tokens ({completion.finish_reason})"
    ttft = "" if completion.ttft_ms is None else f", first after {completion.ttft_ms:.0f} ms"
    tpot = completion.tpot_ms
    rate = "" if tpot is None else f", then {1e3 / tpot:.1f} tokens/s ({tpot:.1f} ms each)"
    return tokens + ttft + rate


def _refuse_sampling(given: dict[str, bool]) -> None:
    """Raises RequestError for options that temperature 0 would leave without effect."""
    idle = " and ".join(f"--{name}" for name, is_given in given.items() if is_given)
    if idle:
        raise RequestError(
            f"{idle} would change nothing, as temperature 0 takes the likeliest token; give a "
            "--temperature above 0 too"
        )


def _print_json(llm: "LLM", stream: "Stream") -> None:
    """The whole completion in one line, and the KV memory that was held for it."""
    import msgspec

    for _ in stream:
        pass
    completion = msgspec.to_builtins(stream.completion)
    click.echo(msgspec.json.encode(completion | {"kv_bytes": llm.kv_bytes}).decode())
