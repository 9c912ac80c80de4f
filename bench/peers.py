"""Starts of engines that have no command of their own for one prompt: one token on stdout, then the end.

peers.py ollama BINARY MODEL PROMPT         starts the server, asks it once, ends it
peers.py ollama-import BINARY MODEL         tells it of the file, once
peers.py vllm MODEL PROMPT CONTEXT
peers.py transformers MODEL PROMPT
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ending

_ADDRESS = "127.0.0.1:11987"


def ollama(binary: str, model: str, prompt: str) -> None:
    """Server, model and one token: what a start costs where nothing runs."""
    with _Ollama(binary) as server:
        request = {
            "model": _ollama_name(model),
            "prompt": prompt,
            "raw": True,
            "stream": True,
            "options": {"num_predict": 1, "temperature": 0},
        }
        with server.post("/api/generate", request) as answer:
            for line in answer:
                text = json.loads(line).get("response", "")
                if text:
                    _say(text)


def ollama_import(binary: str, model: str) -> None:
    """`ollama create` from the file."""
    with _Ollama(binary) as server, tempfile.NamedTemporaryFile("w", suffix=".modelfile") as file:
        file.write(f"FROM {os.path.abspath(model)}\n")
        file.flush()
        command = [binary, "create", _ollama_name(model), "-f", file.name]
        subprocess.run(command, env=server.env, check=True, stdout=subprocess.DEVNULL)


def _ollama_name(model: str) -> str:
    return "bench-" + Path(model).stem.lower()


class _Ollama:
    """A server of our own, on its own port."""

    def __init__(self, binary: str) -> None:
        self.env = {**os.environ, "OLLAMA_HOST": _ADDRESS}
        self._process = subprocess.Popen([binary, "serve"], env=self.env, stderr=subprocess.DEVNULL)

    def __enter__(self) -> "_Ollama":
        while self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://{_ADDRESS}/api/version", timeout=1).close()
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.002)
        raise SystemExit(f"the server ended with {self._process.returncode}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"http://{_ADDRESS}{path}", json.dumps(body).encode())
        return urllib.request.urlopen(request, timeout=600)


def vllm(model: str, prompt: str, context: str) -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(model, max_model_len=int(context), enforce_eager=True)
    _say(engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0))[0].outputs[0].text)


def transformers(model: str, prompt: str) -> None:
    """A folder of safetensors, or a GGUF file, which it dequantises as it loads."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    from transformers import (  # type: ignore[import-not-found,unused-ignore]
        AutoModelForCausalLM,
        AutoTokenizer,
    )

    folder, file = os.path.split(model)
    where = {"pretrained_model_name_or_path": folder, "gguf_file": file} if file.endswith(".gguf") else {
        "pretrained_model_name_or_path": model
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(**where)
    network = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, device_map="cuda:0")
    ids = tokenizer(prompt, return_tensors="pt").to("cuda:0")
    out = network.generate(**ids, max_new_tokens=1, do_sample=False)
    _say(tokenizer.decode(out[0, ids["input_ids"].shape[1] :]))


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


_ENGINES: dict[str, Callable[..., None]] = {
    "ollama": ollama,
    "ollama-import": ollama_import,
    "vllm": vllm,
    "transformers": transformers,
}

if __name__ == "__main__":
    ending.run(lambda: _ENGINES[sys.argv[1]](*sys.argv[2:]))
