"""The reference engine against itself one by one, and against Hugging Face `generate`, in one run.

    python benchmarks/reference.py [MODEL] [--device cuda] [--dtype bfloat16] [--batches 1,8,64]

MODEL is what `edgec reference` takes; by default recipes/smollm2-135m.yaml. Printed for each batch:

* requests of one length together: answer tokens a second, times one by one, times Hugging Face's `generate` on a padded
  batch of the same prompts (greedy, same dtype, same device);
* KV utilisation: positions filled over slots owned, averaged over steps;
* then a batch of mixed lengths, as servers see: how much of what `generate` computes is padding, and both throughputs.

Each figure is the median of `--repeats` runs, ours and theirs in turns, so that what else the machine does disturbs
both alike. Prompts are random tokens: nothing comes from the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgec.architectures.llama import Llama
from edgec.reference.engine import ReferenceEngine
from edgec.reference.load import load
from edgec.reference.options import ReferenceOptions
from edgec.runtime.events import Request
from edgec.runtime.sampling import Sampling

ROOT = Path(__file__).resolve().parent.parent


class Ours:
    """The engine; answers are as long as they are asked to be."""

    def __init__(self, model: Llama, arguments: argparse.Namespace, batch: int) -> None:
        self.engine = ReferenceEngine(
            model,
            None,
            ReferenceOptions(
                device=arguments.device,
                dtype=arguments.dtype,
                max_batch=batch,
                step_tokens=max(512, batch),
                context=1024,
                prefix_cache=False,
            ),
        )

    def run(self, prompts: list[list[int]], answers: list[int]) -> float:
        """Answer tokens a second, prompts included in the time."""
        for prompt, length in zip(prompts, answers, strict=True):
            self.engine.submit(Request(prompt, Sampling(max_tokens=length, ignore_eos=True)))
        started = time.perf_counter()
        while self.engine.stats().running or self.engine.stats().waiting:
            self.engine.step()
        seconds = time.perf_counter() - started
        self.engine.poll()
        return sum(answers) / seconds

    def one_by_one(self, prompts: list[list[int]], answers: list[int]) -> float:
        """The same requests, each when the one before it has ended."""
        seconds = [n / self.run([p], [n]) for p, n in zip(prompts, answers, strict=True)]
        return sum(answers) / sum(seconds)


class Theirs:
    """`generate` over the same weights: prompts padded on the left, and everyone runs as long as the longest."""

    def __init__(self, model: Llama, device: str, dtype: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        c = model.config
        config = LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            max_position_embeddings=c.max_positions,
            tie_word_embeddings=c.tied,
        )
        self.model: Any = LlamaForCausalLM(config).eval()
        state = {k if k.startswith("lm_head") else f"model.{k}": v for k, v in model.state_dict().items()}
        self.model.load_state_dict(state, strict=False)
        self.model = self.model.to(device=device, dtype=getattr(torch, dtype))

    def run(self, prompts: list[list[int]], answers: list[int]) -> float:
        longest, most = max(map(len, prompts)), max(answers)
        device = self.model.device
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=most,
                min_new_tokens=most,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        out[0, -1].item()  # waits for the device
        return sum(answers) / (time.perf_counter() - started)


def medians(repeats: int, *runs: Callable[[], float]) -> list[float]:
    """Of each run, in turns; the first turn warms up and does not count."""
    found = [[run() for run in runs] for _ in range(repeats + 1)][1:]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "recipes/smollm2-135m.yaml"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default=None, help="by default 1,8,16 on the CPU and 1,8,64 on CUDA")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    batches = [int(n) for n in (arguments.batches or ("1,8,16" if arguments.device == "cpu" else "1,8,64")).split(",")]

    loaded = load(arguments.model)
    model = loaded.model
    random = np.random.default_rng(0)
    theirs = Theirs(model, arguments.device, arguments.dtype)
    rows = []

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [random.integers(300, model.config.vocab_size, length).tolist() for length in lengths]

    def measure(name: str, asked: list[list[int]], answers: list[int], *, alone: bool) -> None:
        ours = Ours(model, arguments, len(asked))
        runs = [lambda: ours.run(asked, answers), lambda: theirs.run(asked, answers)]
        if alone:
            runs.append(lambda: ours.one_by_one(asked, answers))
        together, generate, *single = medians(arguments.repeats, *runs)
        row = {
            "requests": name,
            "tokens_per_second": round(together, 1),
            "one_by_one": round(single[0], 1) if single else None,
            "times_one_by_one": round(together / single[0], 2) if single else None,
            "generate": round(generate, 1),
            "times_generate": round(together / generate, 2),
            "kv_utilisation": round(ours.engine.stats().utilisation or 0, 3),
            "padding_in_generate": round(1 - sum(answers) / (len(answers) * max(answers)), 3),
        }
        rows.append(row)
        print(", ".join(f"{k} {v}" for k, v in row.items() if v is not None), file=sys.stderr, flush=True)
        ours.engine.close()

    for batch in batches:
        same = [arguments.prompt] * batch
        measure(f"{batch}", prompts(same), [arguments.answer] * batch, alone=1 < batch <= 16)
    most = max(batches)
    lengths = random.geometric(1 / arguments.answer, most).clip(4, 4 * arguments.answer).tolist()
    mixed = random.integers(arguments.prompt // 4, 2 * arguments.prompt, most).tolist()
    measure(f"{most}, mixed lengths", prompts(mixed), lengths, alone=False)

    if arguments.json:
        print(json.dumps({"model": loaded.origin, "device": arguments.device, "dtype": arguments.dtype, "rows": rows}))
        return
    print(f"{'requests':>20} {'tok/s':>8} {'one by one':>11} {'×':>6} {'generate':>9} {'×':>6} {'KV util.':>9}")
    for row in rows:
        print(
            f"{row['requests']:>20} {row['tokens_per_second']:>8} {row['one_by_one'] or '':>11} "
            f"{row['times_one_by_one'] or '':>6} {row['generate']:>9} {row['times_generate']:>6} "
            f"{row['kv_utilisation']:>9}"
        )


if __name__ == "__main__":
    main()
