"""TVM: libraries compiled with LLVM for this machine and for others, with one file of parameters for all of them.

The library holds code only. Weights lie beside it in `params.safetensors`, INT8 where the quantise pass made them so,
packed for the kernels, each once, and every library (x86, Arm) reads the same file. TVM computes in float32: INT8
weights are widened in registers, and the activations of a static INT8 model are rounded to their steps in float, which
gives INT8's values without INT8's arithmetic. The report counts these as float operations.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from edgec.context import Context
from edgec.errors import ToolMissing
from edgec.model import Artifact, Program, Runner, artifact_file
from edgec.registry import Options, Tool, register_target
from edgec.stagekey import installed_version

from .tvm_build import AARCH64, HOST, Machine, linker, machine
from .tvm_counts import is_baseline
from .tvm_prove import prove_aarch64

if TYPE_CHECKING:
    from .tvm_import import Imported

LIBRARY = "model"
PARAMS = "params.safetensors"
TUNING = "tuning"


class TuneOptions(Options):
    """MetaSchedule: search for better schedules than the built-in ones by running candidates on this machine."""

    trials: int = Field(0, ge=0, description="how many candidates to try in all; 0 doesn't tune")
    database: str | None = Field(
        None,
        description="folder that keeps what was found, relative to the recipe; reused and added to by later builds",
    )


class TvmOptions(Options):
    """What to compile for, how hard to try, and what to prove."""

    triples: list[str] = Field(
        default_factory=lambda: [HOST, AARCH64],
        description="what to compile for: `host` and LLVM triples such as aarch64-linux-gnu or aarch64-linux-android. "
        "Without a linker for one, its object files are left to be linked elsewhere",
    )
    cpus: dict[str, str] = Field(
        default_factory=dict,
        description="LLVM's name of the CPU by triple, e.g. `aarch64-linux-gnu: cortex-a76`. The host's default is "
        "x86-64-v3 where it has AVX2, anything else's is the triple's baseline",
    )
    verify_cross: bool = Field(
        True,
        description="run recorded steps through the aarch64-linux-gnu library under qemu-user; needs qemu and TVM's "
        "runtime for Arm, which is fetched once. Without them the library is reported unproven",
    )
    verify_seconds: float = Field(
        60.0,
        ge=0,
        description="how long a signature may be expected to take there, the cheapest one apart, which always runs: "
        "emulation is some 50 times slower than this machine",
    )
    tune: TuneOptions = Field(default_factory=TuneOptions, description="search for schedules by trying them here")


def tools() -> list[Tool]:
    """TVM with LLVM, a linker, and what aarch64 needs: its linker, and qemu to prove the result."""
    from .tvm_cross import QEMU, qemu

    cross, native = linker(AARCH64), linker(HOST)
    return [
        Tool("apache-tvm", installed_version("apache-tvm"), "pip install apache-tvm", "compiling"),
        Tool("LLVM in TVM", _llvm(), "pip install apache-tvm (a build with USE_LLVM)", "compiling"),
        Tool("g++", _command(native), "apt-get install g++", "linking for this machine"),
        Tool(
            f"{AARCH64}-g++",
            _command(cross),
            f"apt-get install g++-{AARCH64}",
            "linking for aarch64-linux-gnu",
            required=False,
        ),
        Tool("cloudpickle", installed_version("cloudpickle"), "pip install cloudpickle", "tuning", required=False),
        Tool(QEMU, qemu(), "apt-get install qemu-user-static", "proving the aarch64 library", required=False),
    ]


def _command(words: tuple[str, ...] | None) -> str | None:
    return " ".join(words) if words else None


def _llvm() -> str | None:
    """Whether LLVM is inside TVM: a TVM without it imports well and fails after minutes (tvm#17238).

    Read off the compiler's library, because `edgec plan` and `edgec doctor` ask, and importing TVM takes many seconds:
    `target.llvm_version_major` is registered by the LLVM code generator alone. `edgec doctor --probe` compiles.
    """
    import mmap

    try:
        files = distribution("apache-tvm").files or []
    except PackageNotFoundError:
        return None
    for name in files:
        if name.name.startswith("libtvm") and ".so" in name.name:
            with (
                Path(str(name.locate())).open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                if data.find(b"target.llvm_version_major") >= 0:
                    return f"in {name.name}"
    return None


def check_tools(options: TvmOptions) -> list[Machine]:
    """The machines to compile for, once everything that they need is known to be here.

    Raises:
        ToolMissing: TVM, its LLVM or a linker that the recipe's triples need is missing.
    """
    for tool in tools()[:3]:
        if tool.version is None:
            raise ToolMissing(f"tvm: {tool.name} is missing, needed for {tool.needed_for}", hint=tool.install)
    if options.tune.trials and installed_version("cloudpickle") is None:
        raise ToolMissing("tvm: cloudpickle is missing, needed for tuning", hint="pip install cloudpickle")
    machines = [machine(name, options.cpus.get(name)) for name in dict.fromkeys([HOST, *options.triples])]
    asked = "triples" in options.model_fields_set
    for m in machines:
        if m.linker is None and m.name == AARCH64 and asked:
            raise ToolMissing(
                f"tvm: {AARCH64}-g++ is missing, needed to link for {AARCH64}", hint=f"apt-get install g++-{AARCH64}"
            )
    return machines


def open_artifact(artifact: Artifact) -> Runner:
    """The host library in TVM's virtual machine."""
    from .tvm_runner import TvmRunner

    return TvmRunner(artifact)


@register_target("tvm", tools=tools, open=open_artifact)
def convert(program: Program, options: TvmOptions, context: Context) -> Artifact:
    """Import, fuse, (tune,) compile for each machine, and run the Arm library under qemu.

    Raises:
        ToolMissing: TVM, LLVM or a needed linker isn't here.
        ConversionError: an operation that TVM can't take; names the operation, its node and its source line.
        ParityError: the aarch64 library computes something else than the golden.
    """
    from safetensors.numpy import save_file

    from .tvm_counts import count_ops
    from .tvm_import import import_program

    machines = check_tools(options)
    if is_baseline(program):  # made for its size and its speed on this machine only
        machines = machines[:1]
    for made_for in machines:  # a wrong triple or CPU is found before any work
        made_for.target()
    context.progress(0, len(machines) + 1, "importing")
    imported = import_program(program, context)
    save_file(imported.arrays, context.out / PARAMS)
    files = [artifact_file(context.out, PARAMS, "model")]
    libraries = []
    counts: dict[str, int] = {}
    for i, made_for in enumerate(machines):
        context.progress(i + 1, len(machines) + 1, f"compiling for {made_for.name}")
        library, module = _compile(imported, program, made_for, options, context)
        if made_for.name == HOST:
            counts = count_ops(module, imported, program)
            if (context.out / TUNING).is_dir():
                files.append(artifact_file(context.out, TUNING, "tuning"))
        role = "model" if made_for.name == HOST else "cross"
        files += [artifact_file(context.out, name, role) for name in library["files"]]
        libraries.append(library)
    artifact = Artifact(
        target="tvm",
        path=context.out,
        files=tuple(files),
        signatures=program.signatures,
        counts=counts,
        details={
            "library": f"{LIBRARY}.so",
            "params": PARAMS,
            "functions": {
                s.name: {"name": s.name, "params": list(imported.functions[s.name])} for s in program.signatures
            },
            "report_libraries": libraries,
        },
    )
    artifact.save()
    for library in libraries:
        if library["triple"] == AARCH64:
            prove_aarch64(artifact, library, program, options, context)
    artifact.save()
    return artifact


def _compile(
    imported: Imported, program: Program, made_for: Machine, options: TvmOptions, context: Context
) -> tuple[dict[str, Any], Any]:
    """One machine's library, described for the report, and the fused module that it was compiled from."""
    from .tvm_build import compile_module, optimise, write_library

    target = made_for.target()
    module = optimise(imported.module, target, {s.name: len(s.inputs) for s in program.signatures})
    stem = LIBRARY if made_for.name == HOST else f"{LIBRARY}-{made_for.name}"
    executable = compile_module(module, target)
    tuning = options.tune.trials > 0 or options.tune.database is not None
    if tuning and made_for.name == HOST and not is_baseline(program):
        executable, module = _tune(executable, module, imported, program, made_for, options.tune, context)
    written = write_library(executable, context.out, stem, made_for, context.work / "tvm-link")
    if made_for.linker is None:
        context.note(f"no linker for {made_for.name}: its object files are in the artefact, to be linked elsewhere")
    library: dict[str, Any] = {
        "triple": made_for.name,
        "cpu": made_for.cpu,
        "files": [p.name for p in written],
        "bytes": sum(p.stat().st_size for p in written),
        "proof": "executed" if made_for.name == HOST else "none",
    }
    return library, module


def _tune(
    builtin: Any,
    module: Any,
    imported: Imported,
    program: Program,
    made_for: Machine,
    options: TuneOptions,
    context: Context,
) -> tuple[Any, Any]:
    """The executable and the module with tuned schedules where they won; the gain goes to the report."""
    from .tvm_build import compile_module
    from .tvm_tune import compare_builds, tune

    folder = context.recipe_dir / options.database if options.database else context.out / TUNING
    tuned_module, outcomes = tune(module.clone(), made_for.target(context.threads), options.trials, folder, context)
    columns = ("kernel", "built-in ms", "tuned ms", "kept")
    rows = [(o.kernel, o.builtin_ms, o.tuned_ms or "none ran", "tuned" if o.kept else "built-in") for o in outcomes]
    context.table("MetaSchedule", columns, rows)
    if not any(o.kept for o in outcomes):
        context.note(f"tuning: no better schedule for {len(outcomes)} kernels, the built-in ones stay")
        return builtin, module
    tuned = compile_module(tuned_module, made_for.target())
    before, after = compare_builds(builtin, tuned, imported, program)
    context.metric("untuned_ms", before)
    context.metric("tuned_ms", after)
    context.metric("tuning_gain", before / after)
    context.note(
        f"tuning: {sum(o.kept for o in outcomes)} of {len(outcomes)} kernels, {before / after:.2f} times faster"
    )
    return tuned, tuned_module
