"""`reflex run`: one prompt, its continuation on stdout, and the end."""

import os
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from reflex_ipc.engine import Engine
from reflex_ipc.errors import DeadlineError
from reflex_ipc.generation import Generation
from reflex_ipc.sampler import Sampling
from reflex_ipc.stamps import moments, stamp
from reflex_ipc.stops import StopStrings
from reflex_ipc.terminal import prompt_or_messages, say, say_why_cpu, template_arguments, valid_text, warn, write

if TYPE_CHECKING:
    from reflex_ipc.trace import Trace


def run(arguments: Namespace, trace: "Trace | None" = None) -> int:
    """Returns the exit code."""
    began = time.monotonic()
    # Whatever the arguments themselves get wrong is said before a model is opened.
    sampling = _sampling(arguments)
    stop = [valid_text(text, "a stop string") for text in arguments.stop]
    StopStrings(stop)
    prompt = prompt_or_messages(arguments)
    deadline = began + arguments.deadline / 1e3 if arguments.deadline is not None else None

    def poll() -> str | None:
        return "deadline" if deadline is not None and time.monotonic() >= deadline else None

    def progress(*_: object) -> None:
        if poll():
            raise DeadlineError(f"the deadline of {arguments.deadline} ms passed while the model was loading")

    ids: list[int] = []

    def tokenize(engine: Engine) -> None:
        ids[:] = (
            engine.prompt(prompt) if isinstance(prompt, str) else _chat(engine, prompt, template_arguments(arguments))
        )
        engine.check_prompt(ids)  # while nothing else has been waited for

    with Engine.open(
        arguments.model,
        backend=arguments.backend,
        context=arguments.context,
        device=arguments.device,
        threads=arguments.threads,
        progress=None if deadline is None else progress,
        meanwhile=tokenize,
        trace=trace,
        leave_driver=True,
    ) as engine:
        say_why_cpu(engine)
        if arguments.verbose:
            say(f"{engine.gguf.path}: {engine.plan.arch}, {engine.plan.n_layer} layers, backend {engine.backend}")
        generation = engine.generate(
            ids,
            max_tokens=arguments.max_tokens,
            sampling=sampling,
            stop=stop,
            ignore_eos=arguments.ignore_eos,
            poll=poll,
        )
        warn(engine.tokenizer)
        last = ""
        moments.pop("flush", None)
        for token in generation:
            write(token.text)
            if token.text and "flush" not in moments:
                stamp("flush")
            last = token.text or last
        if os.isatty(1) and not last.endswith("\n"):
            write("\n")
        if generation.finish_reason == "context":
            say(f"the context of {engine.n_ctx} tokens is full")
        if arguments.verbose:
            seed = "" if generation.seed is None else f", seed {generation.seed}"
            say(
                f"{generation.prompt_tokens} tokens of prompt, {generation.completion_tokens} of answer, "
                f"ended by {generation.finish_reason}{seed}"
            )
        if arguments.timings:
            _timings(arguments.timings, engine, generation, time.monotonic() - began)
        if generation.finish_reason == "deadline":
            raise DeadlineError(f"the deadline of {arguments.deadline} ms passed")
    return 0


def _chat(engine: Engine, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> list[int]:
    if engine.template.is_fallback:
        say("the file has no chat template; ChatML is used")
    return engine.chat(messages, arguments)


def _sampling(arguments: Namespace) -> Sampling:
    given = {name: value for name in Sampling.__slots__ if (value := getattr(arguments, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return Sampling(**given)


def _timings(kind: str, engine: Engine, generation: Generation, total_s: float) -> None:
    from reflex_ipc.timings import report

    totals = {**engine.timings, **generation.timings, "run_ms": total_s * 1e3}
    usage = {"prompt_tokens": generation.prompt_tokens, "completion_tokens": generation.completion_tokens}
    report(kind, totals, backend=engine.backend, usage=usage)
