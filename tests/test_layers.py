"""Who may import whom (docs: the rooms), and what the command line may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "tensorflow", "coremltools", "tvm", "litert_torch", "onnxruntime", "onnx", "transformers", "jax")

# Rank of a room: a module may import only from rooms of its own rank or below.
RANKS = {
    "edgec.cli": 6,
    "edgec.runtime": 1,
    "edgec.runtime.backend": 5,
    "edgec.runtime.simulate": 5,
    "edgec.runtime.simulation_report": 5,
    "edgec.serving": 5,
    "edgec.reference": 5,
    "edgec.validation": 5,
    "edgec.validation.options": 2,
    "edgec.docgen": 6,
    "edgec.reproduce": 5,
    "edgec.build": 5,
    "edgec.worker": 5,
    "edgec.stages": 4,
    "edgec.plan": 4,
    "edgec.estimate": 4,
    "edgec.bundle": 4,
    "edgec.doctor": 4,
    "edgec.diff": 4,
    "edgec.report": 4,
    "edgec.recipe": 3,
    "edgec.measure": 3,
    "edgec.gates": 2,
    "edgec.comparison": 2,
    "edgec.inspection": 2,
    "edgec.passes": 2,
    "edgec.targets": 2,
    "edgec.tasks": 2,
    "edgec.sources": 2,
    "edgec.architectures": 2,
    "edgec.checkpoint": 2,
    "edgec.parity": 1,
    "edgec.structure": 1,
    "edgec.blame": 1,
    "edgec.graphs": 1,
    "edgec.golden": 1,
    "edgec.model": 1,
    "edgec.decoder": 1,
    "edgec.draft": 1,
    "edgec.registry": 1,
    "edgec.context": 0,
    "edgec.limits": 2,
    "edgec.probes": 2,
    "edgec.diff_match": 4,
    "edgec.diff_onnx": 4,
    "edgec.diff_subject": 4,
    "edgec.diff_tflite": 4,
    "edgec.prove": 5,
    "edgec.ranks": 0,
    "edgec.stagekey": 0,
    "edgec.store": 0,
    "edgec.units": 0,
    "edgec.errors": 0,
}
FREE = {"edgec", "edgec.__main__"}  # the version number, and the entry point


def modules() -> dict[str, Path]:
    found = {}
    for base, name in (
        (ROOT / "edgec", "edgec"),
        (ROOT / "passes", "edgec.passes"),
        (ROOT / "targets", "edgec.targets"),
    ):
        for path in base.rglob("*.py"):
            parts = [name, *path.relative_to(base).with_suffix("").parts]
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


def room(module: str) -> str | None:
    matches = [r for r in RANKS if module == r or module.startswith(r + ".")]
    return max(matches, key=len, default=None)


def imports(path: Path, module: str, *, top_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else list(ast.walk(tree))
    typing_only = {
        id(n)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for child in block.body
        for n in ast.walk(child)
    }
    found = set()
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            parts = package.split(".")
            base = node.module or ""
            if node.level:
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found |= {base} | {f"{base}.{a.name}" for a in node.names}
    return found


def test_every_module_has_a_room() -> None:
    homeless = [m for m in modules() if m not in FREE and room(m) is None]
    assert homeless == []


def test_no_module_imports_upward() -> None:
    wrong = []
    for module, path in modules().items():
        own = room(module)
        if own is None:
            continue
        for imported in imports(path, module):
            other = room(imported)
            if other and RANKS[other] > RANKS[own]:
                wrong.append(f"{module} → {imported}")
    assert wrong == []


def test_no_cycles_between_modules() -> None:
    known = modules()
    graph = {m: {i for i in imports(p, m, top_only=True) if i in known and i != m} for m, p in known.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' → '.join([*path, module])}"
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_nothing_heavy_is_imported_at_the_top_of_a_module() -> None:
    # Torch modules, imported by whoever has torch already; and the text that `init` copies.
    allowed = {"edgec.architectures", "edgec.reference"}
    wrong = [
        f"{module}: {name}"
        for module, path in modules().items()
        if room(module) not in allowed and module != "edgec.cli.starter_model"
        for name in imports(path, module, top_only=True)
        if name.split(".")[0] in HEAVY
    ]
    assert wrong == []


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["schema", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['edgec', *sys.argv[1:]]\n"
        "import atexit; atexit.register(lambda: print('LOADED', *sorted({m.split('.')[0] for m in sys.modules})))\n"
        "from edgec.cli.main import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    loaded = run.stdout.split("LOADED")[1].split()
    assert set(loaded) & {*HEAVY, "numpy", "ruamel", "jinja2", "cyclonedx"} == set()
