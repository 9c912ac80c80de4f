"""Tests of the device's models, the same functions, on the emulated device, for the family they are hardest on.

What runs here is what gpu/test_model.py will run, with exact products; and its sentence about every position with
products as tensor cores have them, for some families.
"""

from collections.abc import Callable
from pathlib import Path

import emulator
import pytest
from emulator import needs_kernels
from gpu import test_model as model

from reflex_ipc.cuda import device, experts, linear

pytest_plugins = ["emulator.fixtures"]
pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def on_the_emulated_device(opened, emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.start_driver, "__defaults__", (0, emulated[0]))


@pytest.mark.parametrize(
    "test",
    [
        model.test_greedy_answers,
        model.test_tree_is_each_branch_alone,
        model.test_scores_are_the_references,
        model.test_scores_are_those_of_the_devices_own_logits,
    ],
    ids=lambda test: test.__name__,
)
@pytest.mark.parametrize("name", model.DEEP)
def test_of_the_device(fixtures: Path, name: str, test: Callable[[Path, str], None]) -> None:
    test(fixtures, name)


@pytest.mark.parametrize("name", ["qwen2", "qwen35", *model.DEEP])
def test_decode_and_prefill_agree_at_every_position(fixtures: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(linear, "linear", emulator.half_linear)
    monkeypatch.setattr(experts, "expert_linear", emulator.half_experts)
    with model.Model(fixtures, name) as opened:
        whole = opened.logits(opened.ids)
        assert 0 < model.worst_position(opened.logits(opened.ids, sizes=[1] * 48), whole) <= model.BOUNDS[name]
