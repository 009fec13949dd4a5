"""`trireme generate PROMPT`: continues a prompt, streaming."""

from __future__ import annotations

import argparse
import sys

from trireme.command.fetch import fetched
from trireme.command.flags import add_model, add_sampling, add_settings, config_from, sampling_from
from trireme.command.startup import phases, uncollected
from trireme.errors import BadRequest
from trireme.types import FinishReason, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    add_model(parser)
    parser.add_argument("--chat", action="store_true", help="take the prompt as a message, by the model's chat template")
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    add_sampling(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    sampling_from(args, SamplingParams(temperature=0.0))  # reports a mistake before the model is loaded
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise BadRequest("The prompt is empty.", "give some text to continue")
    config = fetched(config_from(args))
    with uncollected(), phases() as report:
        from trireme.command.early import open_llm

        llm = open_llm(config, report, chats=args.chat)
    with llm:
        sampling = sampling_from(args, llm.default_sampling() if args.chat else SamplingParams(temperature=0.0))
        messages = [{"role": "user", "content": prompt}]
        if args.json:
            outputs = llm.chat(messages, sampling) if args.chat else llm.generate(prompt, sampling)
            return _print_json(outputs[0])
        pieces = llm.stream_chat(messages, sampling) if args.chat else llm.stream(prompt, sampling)
        finish = None
        for piece in pieces:
            if piece.error:
                raise BadRequest(f"The answer broke off: {piece.error}.")
            print(piece.text, end="", flush=True)
            finish = piece.finish_reason or finish
        print()
        if finish is FinishReason.LENGTH and args.max_tokens is None:
            print(f"trireme: cut after {sampling.max_tokens} tokens; --max-tokens allows more", file=sys.stderr)
    return 0


def _print_json(output: object) -> int:
    import msgspec

    print(msgspec.json.encode(output).decode())
    return 0
