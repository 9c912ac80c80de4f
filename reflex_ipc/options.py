"""The options of every command: first the commands, then the groups they share, then the kinds of values."""

from argparse import ArgumentParser, ArgumentTypeError

from reflex_ipc.stops import DEFAULT_MAX_TOKENS


def run(parser: ArgumentParser) -> None:
    _model(parser)
    _prompt(parser)
    parser.add_argument(
        "-n", "--max-tokens", type=_natural, default=DEFAULT_MAX_TOKENS, metavar="N", help="tokens at most (128)"
    )
    _backend(parser)
    _sampling(parser)
    _chat(parser)
    parser.add_argument(
        "--deadline", type=_positive, metavar="MS", help="stop after so many milliseconds, with exit code 124"
    )
    _timings(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="say on stderr what is done")


def stdio(parser: ArgumentParser) -> None:
    _model(parser)
    _backend(parser)
    _limits(parser)
    _trace(parser)


def uds(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "socket", nargs="?", metavar="SOCKET", help="path of the socket (reflex.sock under XDG_RUNTIME_DIR)"
    )
    _backend(parser)
    _limits(parser)
    parser.add_argument("--connections", type=_positive, default=8, metavar="N", help="clients connected at once (8)")
    parser.add_argument("--mode", type=_mode, default=0o600, metavar="OCTAL", help="permissions of the socket (600)")
    parser.add_argument(
        "--exit-after-idle",
        type=_seconds,
        metavar="S",
        help="end after so many seconds in which no byte came and nothing was asked",
    )
    _trace(parser)


def system1(parser: ArgumentParser) -> None:
    from reflex_ipc.scores import NORMALISATIONS

    _model(parser)
    _prompt(parser)
    parser.add_argument(
        "-a", "--candidate", action="append", default=[], metavar="TEXT", help="a continuation to score (repeatable)"
    )
    parser.add_argument(
        "--candidates-file",
        metavar="FILE",
        help="more of them, from a file or (-) standard input: one a line, empty lines left out; but what begins with "
        "[ or { is JSON, and must be an array of strings",
    )
    parser.add_argument(
        "--candidates-format", choices=("lines", "json"), help="what that file holds, however it begins"
    )
    parser.add_argument("--normalize", choices=NORMALISATIONS, default=NORMALISATIONS[0], help="what is compared (sum)")
    parser.add_argument(
        "--neutral",
        metavar="TEXT",
        help="score the candidates after this, too: what pmi takes off (default: after the token that begins or ends a "
        "text)",
    )
    parser.add_argument(
        "--temp",
        "--temperature",
        dest="temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="of the softmax over the candidates (1)",
    )
    parser.add_argument("--join", default="", metavar="TEXT", help="stands between prompt and candidate (nothing)")
    parser.add_argument("--end", action="store_true", help="score the end of the turn behind each candidate, too")
    parser.add_argument("--best", action="store_true", help="print the likeliest candidate and nothing else")
    parser.add_argument("--json", action="store_true", help="print everything as JSON: the result of protocol.md")
    parser.add_argument(
        "--min-confidence", type=float, metavar="P", help="exit with code 10 if the likeliest has less than this"
    )
    _backend(parser)
    _chat(parser)
    _timings(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="say on stderr what is done")


def tokenize(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the text; - or nothing reads standard input")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the text from a file")
    parser.add_argument("--no-special", action="store_true", help="take control tokens in the text as plain text")
    parser.add_argument("--json", action="store_true", help="a JSON array of {id, text}")


def doctor(parser: ArgumentParser) -> None:
    _device(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def inspect(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "-c", "--context", type=_positive, metavar="N", help="context for the memory a run needs (model's)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def smoke(parser: ArgumentParser) -> None:
    _device(parser)


def bench(parser: ArgumentParser) -> None:
    parser.add_argument("what", choices=("timeline",), help="timeline: one start, phase by phase and layer by layer")
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or smollm2; or a file that --trace wrote")
    _prompt(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="timeline.svg", help="the picture (timeline.svg)")
    parser.add_argument("-n", "--max-tokens", type=_positive, default=1, metavar="N", help="tokens to generate (1)")
    _backend(parser)


def check(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--diff", action="store_true", help="op by op, and stop at the first that differs")
    _device(parser)


# Groups


def _model(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or smollm2 for the installed demo model")


def _prompt(parser: ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads standard input")
    parser.add_argument("-p", "--prompt", dest="prompt_option", metavar="TEXT", help="the prompt, as an option")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")


def _backend(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--context", type=_positive, metavar="N", help="tokens that prompt and answer may have (model's)"
    )
    parser.add_argument("--backend", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (auto)")
    _device(parser)
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (all)")


def _device(parser: ArgumentParser) -> None:
    parser.add_argument("--device", type=_natural, default=0, metavar="N", help="which CUDA device (0)")


def _sampling(parser: ArgumentParser) -> None:
    """Options whose `dest` is a field of `sampler.Sampling`; what is not given keeps that class's default."""
    group = parser.add_argument_group("sampling (docs/sampling.md has the formulas; without these the best token wins)")
    for flags, kind, text in (
        (("--temp", "--temperature"), float, "temperature; 0 is greedy"),
        (("--top-k",), int, "only the k likeliest"),
        (("--top-p",), float, "only the likeliest that together have this probability"),
        (("--min-p",), float, "only those with at least this share of the likeliest one's probability"),
        (("--repeat-penalty",), float, "divide (or multiply) the logits of recent tokens"),
        (("--repeat-last-n",), int, "how many tokens are recent; -1 is all"),
        (("--presence-penalty",), float, "subtract from every token that occurred"),
        (("--frequency-penalty",), float, "subtract for each time it occurred"),
        (("-s", "--seed"), int, "seed of the random numbers; random by default"),
    ):
        name = flags[-1].lstrip("-").replace("-", "_")
        group.add_argument(*flags, dest=name, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="add X to a token's logit (repeatable)"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="go on past end-of-generation tokens")


def _chat(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("chat, by the file's own template")
    group.add_argument("--chat", action="store_true", help="take the prompt as what a user says")
    group.add_argument("--system", metavar="TEXT", help="a system message before it (implies --chat)")
    group.add_argument("--messages", metavar="FILE", help="a JSON array of messages in place of a prompt; - is stdin")
    group.add_argument("--no-thinking", action="store_true", help="set the template's enable_thinking to false")


def _limits(parser: ArgumentParser) -> None:
    """Options whose `dest` is a field of `messages.Limits`; what is not given keeps that class's default."""
    group = parser.add_argument_group("limits, which hello tells every client")
    group.add_argument(
        "--limit-line", dest="line_bytes", type=_positive, metavar="BYTES", help="length of a line (4 MiB)"
    )
    group.add_argument("--limit-prompt", dest="prompt_tokens", type=_positive, metavar="N", help="tokens of a prompt")
    group.add_argument("--limit-tokens", dest="max_tokens", type=_positive, metavar="N", help="tokens of an answer")
    group.add_argument(
        "--write-timeout",
        dest="write_timeout_ms",
        type=int,
        metavar="MS",
        help="for a reader that does not read (30000)",
    )


def _timings(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--timings", nargs="?", const="text", choices=("text", "json"), help="print the phases to stderr at the end"
    )
    _trace(parser)


def _trace(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="FILE", help="write what ran when, for Perfetto (Chrome trace format)")


# Kinds of values


def _natural(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    try:
        n = int(text) if len(text) < 20 else least - 1
    except ValueError:
        n = least - 1
    if not least <= n < 1 << 31:
        raise ArgumentTypeError(f"{text[:40]!r} is no whole number from {least} to 2^31 - 1")
    return n


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e9:
        raise ArgumentTypeError(f"{text[:40]!r} is no number of seconds above 0")
    return seconds


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise ArgumentTypeError(f"{text!r} is no mode; it is written in octal, as in 660")
    return mode


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not ID=X, a token's id and a number") from None
