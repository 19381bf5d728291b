"""Where a build's minutes go, and what a cached rebuild costs.

    python benchmarks/build.py [RECIPE …] [--repeat 3]

For each recipe: a cold build in a store of its own (downloads shared with the usual store), its stages with their share
of the time and their peak memory, then cached rebuilds, the median of `--repeat`. The bound of a cached rebuild is what
the interpreter needs to start and import the command line, measured here as `edgec plan --help`: an unchanged bundle
is recognised by its list of digests, and not read again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edgec.store import default_root

RECIPES = Path(__file__).parent.parent / "recipes"


def run(arguments: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Wall seconds and stdout of one `edgec` command; ends the benchmark with the command's own error."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "edgec", *arguments], env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"edgec {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - start, done.stdout


def bench(recipe: Path, repeat: int, folder: Path) -> dict[str, Any]:
    """One recipe's numbers."""
    environment = {"EDGEC_CACHE": str(folder / "store")}
    (folder / "store").mkdir()
    downloads = default_root() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    (folder / "store" / "downloads").symlink_to(downloads)
    build = ["build", str(recipe), "--json", "--out", str(folder / "out")]
    cold, text = run(build, environment)
    document = json.loads(text)
    cached = statistics.median(run(build, environment)[0] for _ in range(repeat))
    start_up = statistics.median(run(["plan", "--help"], environment)[0] for _ in range(repeat))
    return {
        "recipe": recipe.stem,
        "cold_seconds": cold,
        "cached_seconds": cached,
        "cached_bound_seconds": start_up,
        "stages": [{k: s[k] for k in ("stage", "seconds", "peak_memory")} for s in document["ledger"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", type=Path, default=[RECIPES / "efficientnet-lite0.yaml"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for recipe in arguments.recipes:
        with tempfile.TemporaryDirectory() as folder:
            results.append(bench(recipe, arguments.repeat, Path(folder)))
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        cold = result["cold_seconds"]
        print(f"{result['recipe']}: cold {cold:.1f} s")
        for stage in result["stages"]:
            print(
                f"  {stage['stage']:<14} {stage['seconds']:7.1f} s {stage['seconds'] / cold:6.1%}"
                f" {(stage['peak_memory'] or 0) / 2**20:8.0f} MiB"
            )
        ratio = result["cached_seconds"] / result["cached_bound_seconds"]
        gain = cold / result["cached_seconds"]
        print(
            f"  cached rebuild {result['cached_seconds']:.2f} s, {ratio:.1f}× its bound, {gain:.0f}× faster than cold"
        )


if __name__ == "__main__":
    main()
