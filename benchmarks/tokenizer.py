"""Encoding speed of the core's tokenizer beside Hugging Face's `tokenizers`, on the same texts in one run.

    python benchmarks/tokenizer.py TOKENIZER.json [--repeat 5] [--json]

Both encode each text with one thread; the best of `--repeat` counts, because everything that disturbs a run makes it
slower. The bound is what reading the text once costs: checking it to be UTF-8 by Python's own decoder.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

SENTENCES = {
    "Korean, Chinese, Arabic": "안녕하세요 세계, 오늘 날씨가 좋네요. 人工智能模型正在改变世界。 مرحبا بالعالم ",
    "emoji and marks": "👩‍👩‍👧‍👦 👍🏽 e\u0301a\u0308 ☃️ 🇰🇷 ",
    "digits": "31415926535897932384626433832795 2718281828 ",
    "one long word": "pneumonoultramicroscopicsilicovolcanoconiosis",
}


def texts() -> dict[str, str]:
    """English and code from this repository, the rest repeated to 300 kB."""
    root = Path(__file__).parent.parent
    english = "".join(p.read_text() for p in sorted(root.glob("**/*.md")) if ".venv" not in p.parts)
    code = "".join(p.read_text() for p in sorted((root / "edgec").rglob("*.py")))
    made = {name: text * (300_000 // len(text.encode())) for name, text in SENTENCES.items()}
    return {"English": english[:1_000_000], "code": code[:1_000_000], **made}


def best(action: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Seconds of the fastest of `repeat` runs, and the result."""
    fastest, result = float("inf"), None
    for _ in range(repeat):
        start = time.perf_counter()
        result = action()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest, result


def main() -> None:
    from tokenizers import Tokenizer as Peer

    from edgec.runtime.tokenizer import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load, own = best(lambda: Tokenizer(arguments.tokenizer), arguments.repeat)
    peer_load, peer = best(lambda: Peer.from_file(str(arguments.tokenizer)), arguments.repeat)
    results = []
    for name, text in texts().items():
        size = len(raw := text.encode())
        seconds, tokens = best(lambda text=text: own.encode(text, special=True), arguments.repeat)
        peer_seconds, wanted = best(lambda text=text: peer.encode(text, add_special_tokens=False), arguments.repeat)
        bound, _ = best(lambda raw=raw: raw.decode(), arguments.repeat)
        rates = {"own": seconds, "peer": peer_seconds, "bound": bound}
        results.append(
            {"text": name, "bytes": size, "equal": tokens == wanted.ids}
            | {f"{who}_mb_per_second": size / taken / 1e6 for who, taken in rates.items()}
        )
    document = {"load_ms": load * 1e3, "peer_load_ms": peer_load * 1e3, "encode": results}
    if arguments.json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
    print(f"opening the file: {load * 1e3:.0f} ms; tokenizers {peer_load * 1e3:.0f} ms\n")
    print(f"{'text':<26}{'kB':>6}{'MB/s':>9}{'tokenizers':>12}{'ratio':>8}{'bound':>9}  equal")
    for r in results:
        own_rate, peer_rate = r["own_mb_per_second"], r["peer_mb_per_second"]
        print(
            f"{r['text']:<26}{r['bytes'] / 1e3:>6.0f}{own_rate:>9.1f}{peer_rate:>12.1f}{own_rate / peer_rate:>7.1f}×"
            f"{r['bound_mb_per_second']:>9.0f}  {r['equal']}"
        )


if __name__ == "__main__":
    main()
