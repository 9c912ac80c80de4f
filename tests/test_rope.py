"""Rotations: what the keys of a file make of angles, by fixtures at stretched positions and by the published formulas.

A file whose angles are halved has the fixture's logits at every other position, which come from another library.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_parts import Parts

from reflex_ipc import archs, ops
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Step
from reflex_ipc.reference.ops import FUNCTIONS, Run, States
from reflex_ipc.reference.weights import Weights

BOUND = 2e-5
"""As in test_fidelity.py."""


def logits_at(file: Path, ids: list[int], positions: range) -> np.ndarray:
    with GGUF.open(file) as gguf:
        plan = archs.build(gguf)
        states = States(plan.states)
        states.reserve(len(ids))
        step = Step.text(ids, 0, range(len(ids)))._replace(positions=positions)
        run = Run(step, Weights(gguf, plan, 1), states)
        for op in plan.ops:
            run.values[op.out.name] = FUNCTIONS[type(op)](op, run)
        return run[plan.logits]


def linear(p: Parts) -> None:
    p.set(rope__scaling__type="linear", rope__scaling__factor=2.0)


def linear_unless_said(p: Parts) -> None:
    p.set(rope__scaling__factor=2.0)


def linear_by_its_old_name(p: Parts) -> None:
    p.set(rope__scale_linear=2.0)


def divisors(p: Parts) -> None:
    p["rope_freqs.weight"] = np.full(p.key("rope.dimension_count") // 2, 2, np.float32)


@pytest.mark.parametrize("change", [linear, linear_unless_said, linear_by_its_old_name, divisors])
def test_halved_angles(fixtures: Path, tmp_path: Path, change: Callable[[Parts], None]) -> None:
    p = Parts(fixtures / "exact/llama-f16.gguf")
    change(p)
    file = p.write(tmp_path / "changed.gguf")
    reference = np.load(fixtures / "exact/llama-f16.npz")
    ids, wanted = reference["ids"].tolist(), reference["logits"].astype(np.float64)
    found = logits_at(file, ids, range(0, 2 * len(ids), 2))
    assert np.linalg.norm(found - wanted) <= BOUND * np.linalg.norm(wanted)
    assert np.linalg.norm(logits_at(file, ids, range(len(ids))) - wanted) > 0.01 * np.linalg.norm(wanted)


def test_no_scaling_whatever_its_factor(fixtures: Path, tmp_path: Path) -> None:
    p = Parts(fixtures / "exact/llama-f16.gguf")
    p.set(rope__scaling__type="none", rope__scaling__factor=2.0)
    reference = np.load(fixtures / "exact/llama-f16.npz")
    ids, wanted = reference["ids"].tolist(), reference["logits"].astype(np.float64)
    found = logits_at(p.write(tmp_path / "changed.gguf"), ids, range(len(ids)))
    assert np.linalg.norm(found - wanted) <= BOUND * np.linalg.norm(wanted)


def test_yarn_of_a_qwen3_file_for_long_texts(fixtures: Path, tmp_path: Path) -> None:
    """Factor 4: 1 + 0.1 ln 4 on cosine and sine, as its paper has it; the context it was trained with decides."""
    p = Parts(fixtures / "exact/qwen3-f16.gguf")
    p.set(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32768,
        context_length=131072,
    )
    with GGUF.open(p.write(tmp_path / "changed.gguf")) as gguf:
        (rope,) = {op.rope for op in archs.build(gguf).ops if isinstance(op, ops.Rotate)}
    assert (rope.n_ctx_orig, rope.freq_scale) == (32768, 0.25)
    assert rope.magnitude == pytest.approx(1.138629, rel=1e-6)


def test_frequencies_of_yarn() -> None:
    """DeepSeek-V3: 64 dimensions, base 10000, factor 40, 4096 positions. The ramp goes from pair 10 to pair 23."""
    found = ops.Rope("norm", 64, 10000.0, 1 / 40, 4096).frequencies()
    plain = [10000.0 ** (-i / 32) for i in range(32)]
    assert found[:11] == pytest.approx(plain[:11], rel=1e-12)
    assert found[23:] == pytest.approx([f / 40 for f in plain[23:]], rel=1e-12)
    for i in range(11, 23):
        share = (i - 10) / 13
        assert found[i] == pytest.approx(plain[i] * (share / 40 + 1 - share), rel=1e-12)


@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize("offset", [0, 4])
def test_pairs_turn_like_complex_numbers(style: str, offset: int) -> None:
    """Part of a head, at positions beyond what float32 counts in angles; the rest of it stays as it is."""
    rng = np.random.default_rng(0)
    n_head, width, n_rot = 3, 16, 8
    positions = [0, 1, 7, 131071]
    x = rng.standard_normal((len(positions), n_head * width)).astype(np.float32)
    factors = rng.uniform(1, 8, n_rot // 2).astype(np.float32)
    rope = ops.Rope(style, n_rot, 1e6, magnitude=1.25)
    op = ops.Rotate("y", ops.Value("y", x.shape[1]), ops.Value("x", x.shape[1]), n_head, offset, rope, "factors")
    weights = {"factors": factors}
    step = Step([0] * len(positions), positions, [-1, 0, 1, 2], [], 0)
    run = Run(step, weights, States(()))  # type: ignore[arg-type]
    run.values = {"x": x}
    found = FUNCTIONS[ops.Rotate](op, run).reshape(len(positions), n_head, width)
    wanted = x.reshape(len(positions), n_head, width).astype(np.float64)
    for i in range(n_rot // 2):
        pair = (offset + 2 * i, offset + 2 * i + 1) if style == "norm" else (offset + i, offset + i + n_rot // 2)
        for t, position in enumerate(positions):
            angle = position * 1e6 ** (-2 * i / n_rot) / float(factors[i])
            z = (wanted[t, :, pair[0]] + 1j * wanted[t, :, pair[1]]) * 1.25 * complex(math.cos(angle), math.sin(angle))
            wanted[t, :, pair[0]], wanted[t, :, pair[1]] = z.real, z.imag
    assert np.abs(found - wanted).max() <= 1e-6
    outside = [d for d in range(width) if not offset <= d < offset + n_rot]
    assert (found[:, :, outside] == x.reshape(found.shape)[:, :, outside]).all()
