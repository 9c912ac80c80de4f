"""Counters and histograms in the text format of Prometheus. What a metric means is said once, in `_HELP`."""

from collections import defaultdict

_HELP = {
    "reflex_sidecar_requests_total": ("counter", "HTTP requests, by route and status (499: the client left)."),
    "reflex_sidecar_client_gone_total": ("counter", "Generations ended because the client hung up or did not read."),
    "reflex_sidecar_finished_total": ("counter", "Generations that ended, by the engine's finish_reason."),
    "reflex_sidecar_prompt_tokens_total": ("counter", "Tokens of prompts."),
    "reflex_sidecar_reused_tokens_total": ("counter", "Tokens of prompts that were not computed again."),
    "reflex_sidecar_completion_tokens_total": ("counter", "Tokens generated."),
    "reflex_sidecar_request_seconds": ("histogram", "From the request's headers to the end of the answer."),
    "reflex_sidecar_first_token_seconds": ("histogram", "From the request to its first token, waiting included."),
    "reflex_sidecar_running": ("gauge", "Requests that are with the engine."),
    "reflex_sidecar_waiting": ("gauge", "Requests that wait for their turn."),
    "reflex_sidecar_engine_ready": ("gauge", "1 if the engine takes requests."),
    "reflex_sidecar_engine_restarts_total": ("counter", "Times the engine's process ended and had to be restarted."),
}
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds, in seconds."""


class Metrics:
    def __init__(self) -> None:
        self._counters: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, list[int]] = {}
        self._sums: dict[str, float] = defaultdict(float)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Label values are ours (routes, codes), never a client's, so their number is bounded."""
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        self._counters[name]["{" + text + "}" if text else ""] += amount

    def observe(self, name: str, seconds: float) -> None:
        counts = self._histograms.setdefault(name, [0] * (len(BUCKETS) + 1))
        counts[sum(bound < seconds for bound in BUCKETS)] += 1
        self._sums[name] += seconds

    def render(self, gauges: dict[str, float]) -> str:
        """The text. `gauges` are the values that are read now, not counted."""
        lines: list[str] = []
        for name, (kind, help) in _HELP.items():
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            if kind == "histogram":
                lines += self._histogram(name)
            elif name in gauges:
                lines.append(f"{name} {gauges[name]:g}")
            else:
                lines += [f"{name}{labels} {value:.12g}" for labels, value in sorted(self._counters[name].items())]
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*BUCKETS, "+Inf"), self._histograms.get(name, [0] * (len(BUCKETS) + 1)), strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sums[name]:.6f}", f"{name}_count {total}"]
