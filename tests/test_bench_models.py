"""Model files with random weights, against the `gguf` package and published sizes; the work of a step, by hand; the
speed of a loaded model."""

import json
import lzma
import math
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from fakecuda import ROOT

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import gguf_out
import measure
import models
import rates
import warm
import work

from reflex_ipc import archs, inspect
from reflex_ipc.engine import Engine
from reflex_ipc.gguf import GGUF
from reflex_ipc.tokenizer import Tokenizer

PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
}
"""Of the published checkpoints, a tied output matrix counted once, blocks for further tokens not."""
FAMILIES = {"llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "qwen3next", "deepseek2"}
ONE_EACH = ["llama-3.2-1b", "qwen2.5-1.5b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3.5-0.8b", "qwen3.5-35b-a3b"]
ONE_EACH += ["qwen3-next-80b-a3b"]


@pytest.fixture(scope="module")
def words(fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 512 tokens, so that other readers are quick with the file."""
    path = tmp_path_factory.mktemp("words") / "small.xz"
    path.write_bytes(lzma.compress((fixtures / "exact" / "qwen3-f16.gguf").read_bytes(), preset=0))
    return path


LLAMA_CPP = """
import json, os, sys, urllib.request, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_gpu_layers, p.warmup, p.verbosity = sys.argv[1], 64, 0, False, 0
server = xllamacpp.Server(p)
asked = {"prompt": json.loads(sys.argv[2]), "n_predict": 4, "temperature": 0, "ignore_eos": True, "return_tokens": True}
request = urllib.request.Request(server.listening_address + "/completion", json.dumps(asked).encode())
request.add_header("Content-Type", "application/json")
print("\\n" + json.dumps(json.load(urllib.request.urlopen(request))["tokens"]), flush=True)
os._exit(0)
"""


def small(name: str) -> models.Shape:
    """A shape with few layers, experts and tokens."""
    shape = models.SHAPES[name]
    n_layer = 4 if shape.n_head_v else 2
    n_expert, n_used = (8, min(shape.n_used, 8)) if shape.n_expert else (0, 0)
    return shape._replace(n_layer=n_layer, n_vocab=640, n_expert=n_expert, n_used=n_used, bos=None)


def write(path: Path, name: str, shape: models.Shape, mix: str, words: Path) -> list[gguf_out.Tensor]:
    tensors = models.tensors(shape, mix)
    gguf_out.write(path, models.metadata(name, shape, mix), words, shape.n_vocab, tensors, seed=7)
    return tensors


class TestModels:
    @pytest.mark.parametrize("name", PARAMETERS)
    def test_parameters(self, name: str):
        tensors = models.tensors(models.SHAPES[name], "Q4_K_M")
        counted = [
            tensor.n_elements for tensor in tensors if tensor.name != "rope_freqs.weight"
        ]  # computed, not learnt
        assert sum(counted) == PARAMETERS[name]

    def test_every_family_has_a_shape(self):
        assert {shape.arch for shape in models.SHAPES.values()} == FAMILIES == {*archs.FAMILIES}

    @pytest.mark.parametrize("name", [name for name in models.SHAPES if name != "deepseek-v3"])
    def test_a_whole_file_opens(self, name: str, tmp_path: Path):
        """All layers, the real vocabulary, holes for weights: with our reader, as a plan, and by `inspect`."""
        path, shape = tmp_path / "m.gguf", models.SHAPES[name]
        models.make(path, name, sparse=True)
        with GGUF.open(path) as opened:
            plan = archs.build(opened)
            description = inspect.describe(opened)
            inspect.add_plan(description, opened, shape.n_ctx)
            tokenizer = Tokenizer.from_gguf(opened)
        assert (plan.arch, plan.n_layer, plan.n_vocab, plan.n_ctx_train) == (
            *(shape.arch, shape.n_layer, shape.n_vocab, shape.n_ctx),
        )
        assert not set(opened.tensors) - {*plan.weights} and len(description["memory"]) == 2
        assert tokenizer.decode(tokenizer.encode("The capital of France")).endswith("The capital of France")
        path.unlink()

    def test_rotations_of_llama(self):
        """What is known of Llama 3.2's: the first 15 of 32 as they were, the last three 32 times slower."""
        [freqs] = [t for t in models.tensors(models.SHAPES["llama-3.2-1b"], "Q4_K_M") if t.name == "rope_freqs.weight"]
        assert isinstance(freqs.fill, tuple) and len(freqs.fill) == 32
        wavelengths = [2 * math.pi * 5e5 ** (i / 32) for i in range(32)]
        for factor, length in zip(freqs.fill, wavelengths, strict=True):
            assert (factor == 1) == (length <= 2048) and (factor == 32) == (length >= 8192)
        assert list(freqs.fill) == sorted(freqs.fill)

    def test_mix(self):
        """8B in Q4_K_M as the quantiser's rule has it, and with it the size of the published file, 5.03 GB."""
        tensors = {t.name: t.type for t in models.tensors(models.SHAPES["qwen3-8b"], "Q4_K_M")}
        finer = [i for i in range(36) if tensors[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
        assert finer == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, *range(31, 36)]
        assert finer == [i for i in range(36) if tensors[f"blk.{i}.attn_v.weight"] == "Q6_K"]
        assert (tensors["output.weight"], tensors["token_embd.weight"]) == ("Q6_K", "Q4_K")
        lite = {t.name: t.type for t in models.tensors(models.SHAPES["deepseek-v2-lite"], "Q4_K_M")}
        assert {lite[f"blk.{i}.ffn_down_exps.weight"] for i in range(1, 27)} == {"Q5_0", "Q8_0"}  # rows of 1408
        assert lite["blk.5.attn_k_b.weight"] == "Q5_0"

    @pytest.mark.parametrize(
        ("name", "mix"),
        [
            *((name, "Q4_K_M") for name in models.SHAPES if name != "deepseek-v3"),
            ("qwen3-0.6b", "Q8_0"),
            ("qwen3-0.6b", "BF16"),
        ],
    )
    def test_the_gguf_package_reads_them(self, name: str, mix: str, words: Path, tmp_path: Path):
        path = tmp_path / "m.gguf"
        shape = small(name)
        tensors = write(path, name, shape, mix, words)
        reader = gguf.GGUFReader(path)
        assert {t.name: (t.tensor_type.name, tuple(map(int, t.shape))) for t in reader.tensors} == {
            t.name: (t.type, t.ne) for t in tensors
        }
        assert reader.fields["general.architecture"].contents() == shape.arch
        assert reader.fields[f"{shape.arch}.block_count"].contents() == shape.n_layer
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        assert len(tokens) == 640 == len(reader.fields["tokenizer.ggml.token_type"].contents())
        assert tokens[512] == "[PAD512]" and reader.fields["tokenizer.ggml.token_type"].contents()[-1] == 5
        for tensor in reader.tensors:
            if tensor.tensor_type.name != "F32":  # as wide a spread as a trained row times a normalised vector has
                rows = tensor.data.reshape(-1, tensor.data.shape[-1])[:64]
                values = gguf.quants.dequantize(rows, tensor.tensor_type)
                assert values.std() * math.sqrt(tensor.shape[0]) == pytest.approx(1, rel=0.08), tensor.name
                assert abs(values.mean()) < 0.1 * values.std(), tensor.name
        path.unlink()

    @pytest.mark.parametrize("name", [*ONE_EACH, "deepseek-v2-lite"])
    def test_a_forward_pass(self, name: str, words: Path, tmp_path: Path):
        path = tmp_path / "m.gguf"
        write(path, name, small(name), "Q4_K_M", words)
        with Engine.open(path, backend="cpu", context=32) as engine:
            logits = engine.logits(list(range(5, 13)))
        assert logits.shape == (8, 640)
        assert 0.8 < logits.std() < 1.2  # normalised rows times random ones
        assert len(np.unique(logits[-1])) > 600  # rows of the output matrix differ
        path.unlink()

    @pytest.mark.parametrize("name", ONE_EACH)
    def test_llama_cpp_says_the_same(self, name: str, words: Path, tmp_path: Path):
        """Its activations are int8, so a token that is not our best must be within that error of it."""
        path = tmp_path / "m.gguf"
        write(path, name, small(name), "Q4_K_M", words)
        ids = list(range(20, 28))
        command = [sys.executable, "-c", LLAMA_CPP, path, json.dumps(ids)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        tokens = json.loads(answer.stdout.splitlines()[-1])
        with Engine.open(path, backend="cpu", context=64) as engine:
            logits = engine.logits(ids + tokens[:-1])[len(ids) - 1 :]
        behind = logits.max(axis=1) - logits[range(4), tokens]
        assert len(tokens) == 4 and max(behind) < 0.15, behind  # the standard deviation of a logit is 1
        path.unlink()

    def test_what_inspect_says_of_v3(self, tmp_path: Path):
        """It is larger than most machines; the file has holes for weights. The sums are by hand: 61 layers, each a
        latent of 512 and a rotated key of 64 a token; rows of the embedding stay in the file on the CPU."""
        path = tmp_path / "v3.gguf"
        assert models.make(path, "deepseek-v3", sparse=True) == path.stat().st_size > 404e9
        assert path.stat().st_blocks * 512 < 16e6
        with GGUF.open(path) as opened:
            description = inspect.describe(opened)
            inspect.add_plan(description, opened, 4096)
        cpu, cuda = description["memory"]
        parameters, embedding = PARAMETERS["deepseek-v3"], 129280 * 7168
        blocks = sum(total["bytes"] for total in description["types"].values())
        assert cpu["weights"] == 4 * (parameters - embedding)
        assert (cpu["bytes_per_token"], cpu["cache"]) == (4 * 61 * 576, 4096 * 4 * 61 * 576)
        assert (cpu["fixed_state"], cuda["fixed_state"]) == (0, 0)
        assert 0 <= cuda["weights"] - blocks < 32 * len(description["tensors"])  # what tensors are padded by
        a_token = 61 * (2 * 576 + 2 * 4)  # half precision, and two scales a row
        assert (cuda["bytes_per_token"], cuda["cache"]) == (a_token, 4096 * a_token)
        for need in (cpu, cuda):
            assert need["total"] == need["weights"] + need["cache"] + need["scratch"]

    def test_the_same_again(self, words: Path, tmp_path: Path):
        for path in (tmp_path / "a", tmp_path / "b"):
            write(path, "qwen3-0.6b", small("qwen3-0.6b"), "Q4_K_M", words)
        assert measure.sha256(tmp_path / "a") == measure.sha256(tmp_path / "b")

    def test_the_command_with_the_real_vocabulary(self, tmp_path: Path):
        out = tmp_path / "m.gguf"
        command = [sys.executable, ROOT / "bench" / "models.py", out, "qwen3-0.6b", "--layers", "1"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "GB/s" in said
        with GGUF.open(out) as opened:
            assert archs.build(opened).n_vocab == 151936
            tokenizer = Tokenizer.from_gguf(opened)
            assert tokenizer.n_vocab == 151936
            assert tokenizer.decode(tokenizer.encode("The capital of France")) == "The capital of France"


class TestWork:
    def test_a_dense_model(self, words: Path, tmp_path: Path):
        """Decoding and a prompt, against sums by hand."""
        shape = small("qwen3-0.6b")
        tensors = write(tmp_path / "m", "qwen3-0.6b", shape, "Q4_K_M", words)
        with GGUF.open(tmp_path / "m") as opened:
            plan = archs.build(opened)
            one, prompt = work.step(plan, 1, 100, 1), work.step(plan, 10, 0, 1)
        matrices = [t for t in tensors if len(t.ne) == 2]
        embedding = next(t for t in matrices if t.name == "token_embd.weight")
        layers = sum(t.n_elements for t in matrices) - embedding.n_elements
        width, kept = 16 * 128, 2 * 8 * 128 * 2  # of q; of k and v, in bytes
        assert one.flops == 2 * (layers + embedding.n_elements) + shape.n_layer * 4 * width * 101
        row = embedding.nbytes / 640
        assert one.bytes == sum(t.nbytes for t in matrices) + row + shape.n_layer * kept * 101
        assert prompt.flops == 20 * layers + 2 * embedding.n_elements + shape.n_layer * 4 * width * 55
        assert prompt.bytes == one.bytes + 9 * row - shape.n_layer * kept * 91

    def test_experts(self, words: Path, tmp_path: Path):
        shape = small("qwen3-30b-a3b")._replace(n_used=2)
        tensors = write(tmp_path / "m", "qwen3-30b-a3b", shape, "Q4_K_M", words)
        with GGUF.open(tmp_path / "m") as opened:
            plan = archs.build(opened)
            one, many = work.step(plan, 1, 0, 0), work.step(plan, 1000, 0, 0)
        slabs = sum(t.nbytes for t in tensors if "_exps" in t.name)
        rest = sum(t.nbytes for t in tensors if t.name.startswith("blk.") and len(t.ne) == 2)
        row, kept = next(t for t in tensors if t.name == "token_embd.weight").nbytes / 640, 2 * 4 * 128 * 2 * 2
        assert one.bytes == pytest.approx(slabs * 2 / 8 + rest + row + kept)
        assert many.bytes == pytest.approx(slabs + rest + 1000 * (row + kept))


class TestWarm:
    def test_through_the_engine(self, fixtures: Path, tmp_path: Path):
        """Beside a llama-bench that answers at once."""
        entry = {"n_prompt": 32, "n_gen": 0, "n_depth": 0, "samples_ns": [10**7] * 3}
        other = tmp_path / "llama-bench"
        other.write_text(
            f"""#!/bin/sh\ncase "$*" in *"-n 0"*) echo '{json.dumps([entry])}' ;; *) echo '[]' ;; esac\n"""
        )
        other.chmod(0o755)
        model, out = fixtures / "exact" / "qwen35-f16.gguf", tmp_path / "warm.json"
        command = [sys.executable, ROOT / "bench" / "warm.py", model, "--out", out, "--backend", "cpu", "--repeat", "2"]
        command += ["--prefill", "32", "600", "--new-lengths", "50", "--depths", "16"]
        command += ["--decode-tokens", "8", "--score", "40"]
        result = subprocess.run([*command, "--llama-bench", other], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        saved = json.loads(out.read_text())
        assert [(row["engine"], row["what"], row["tokens"]) for row in saved["rows"]] == [
            ("reflex", "prefill", 32),
            ("reflex", "prefill", 600),
            ("reflex", "prefill of a new length", 50),
            ("reflex", "decode", 8),
            ("reflex", "score", 40),
            ("llama-bench", "prefill", 32),
        ]
        assert saved["rows"][5]["per_second"] == pytest.approx(3200)
        assert saved["rates"] is None and saved["backend"] == "cpu"
        for row in saved["rows"][:5]:
            assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        with GGUF.open(model) as opened:
            plan = archs.build(opened)
            pieces = work.step(plan, 512, 0, 0) + work.step(plan, 88, 512, 1)
            assert (saved["rows"][1]["bytes"], saved["rows"][1]["flops"]) == pieces
            tokenizer = Tokenizer.from_gguf(model)
            tokens = [tokenizer.encode(candidate) for candidate in warm.CANDIDATES]
            n = len({tuple(each[:i]) for each in tokens for i in range(len(each))})
            assert (saved["rows"][4]["bytes"], saved["rows"][4]["flops"]) == work.step(plan, 40 + n - 1, 0, n)

    def test_prompts_that_do_not_count_come_before(self, fixtures: Path, monkeypatch: pytest.MonkeyPatch):
        """A length twice, whose launches are then kept; or another length each time, of which none has come."""
        lengths: list[int] = []
        with Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu") as engine:
            generate = engine.generate
            monkeypatch.setattr(
                engine, "generate", lambda ids, **how: (lengths.append(len(ids)), generate(ids, **how))[1]
            )
            bench = warm.Bench(engine, 3)
            assert len(bench.prefill(8)["seconds"]) == 3 and lengths == [8] * 5
            lengths.clear()
            assert len(bench.new_length(8)["seconds"]) == 3 and lengths == [8, 9, 10, 11]

    def test_what_the_context_has_no_room_for_is_listed(self, fixtures: Path, tmp_path: Path):
        """Of the tokens that the fixture was trained for, 64 are for candidates and what is not counted."""
        model, out = fixtures / "exact" / "qwen3-f16.gguf", tmp_path / "warm.json"
        with GGUF.open(model) as opened:
            most = archs.build(opened).n_ctx_train
        command = [sys.executable, ROOT / "bench" / "warm.py", model, "--out", out, "--backend", "cpu", "--repeat", "1"]
        command += ["--prefill", str(most - 64), str(most - 63), "--new-lengths", str(most - 64)]
        command += ["--depths", str(most - 68), str(most - 67)]
        command += ["--decode-tokens", "4", "--score", str(most - 63)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        saved = json.loads(out.read_text())
        assert [(row["what"], row.get("depth", row["tokens"])) for row in saved["rows"]] == [
            ("prefill", most - 64),
            ("decode", most - 68),
        ]
        why = f"the model's context is {most} tokens"
        assert saved["not_run"] == [
            *(
                {"contender": f"reflex, {what}", "why": why}
                for what in (
                    f"prefill {most - 63}",
                    f"prefill of a new length {most - 64}",
                    f"decode at depth {most - 67}",
                )
            ),
            {"contender": f"reflex, score {most - 63}", "why": why},
            {"contender": "llama-bench", "why": "not given (--llama-bench PATH)"},
        ]

    def test_shares_of_the_device(self):
        row = {"seconds": [0.01, 0.02, 0.5], "bytes": 4.5e10, "flops": 1.6e12}
        best = {"read_bytes_s": 4.5e12, "copy_bytes_s": 4e12, "bf16_flop_s": 8e14}
        assert rates.shares(row, best) == pytest.approx({"of_read": 0.5, "of_copy": 0.5625, "of_bf16": 0.1})
        assert rates.shares(row, None) == {}
