"""The native engine: INT8 weights for edgec's own C++ runtime, its sources, and libraries that are ready to load.

For decoders of the Llama family. The artefact is all that an app needs: the model (safetensors, mapped into memory),
the tokenizer, a manifest, `runtime/` with the sources and the examples, and `lib/<platform>/` for the platforms whose
compilers are here. Weights and scales are those that the quantise pass fixed; activations are quantised as they come,
in groups of 32, so that one outlier doesn't cost a row its precision.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from edgec.context import Context
from edgec.errors import ConversionError, Reason, ToolMissing
from edgec.model import Artifact, ArtifactFile, Program, Runner, artifact_file
from edgec.registry import Options, Tool, register_target
from edgec.units import parse_bytes

if TYPE_CHECKING:
    from edgec.runtime.compile import Platform

KvName = Literal["int8", "fp16", "fp32"]


class NativeOptions(Options):
    """The sizes that the runtime starts with; an app may choose others when it opens the bundle."""

    context: int = Field(2048, ge=8, description="positions of a sequence; at most what the model was trained for")
    block_size: Literal[4, 8, 16, 32, 64] = Field(16, description="positions in a block of the KV cache")
    max_batch: int = Field(8, ge=1, le=64, description="sequences that a step takes")
    step_tokens: int = Field(128, ge=1, le=4096, description="tokens of a step: decoding first, then prompt chunks")
    kv: KvName = Field("int8", description="type of keys and values in the cache")
    memory: int | None = Field(
        None, description="budget for weights, cache and scratch; by default enough for two sequences of full length"
    )
    libraries: list[str] | None = Field(
        None, description="platforms to compile for, such as linux-aarch64; by default those whose compilers are here"
    )

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> int | None:
        return None if value is None else parse_bytes(value)


def tools() -> list[Tool]:
    """A compiler for this machine; cross compilers for others are welcome."""
    from edgec.runtime.compile import PLATFORMS, compiler, compiler_hint, host

    def tool(platform: Platform) -> Tool:
        found = compiler(platform)
        here = platform == host()
        return Tool(
            f"C++ compiler for {platform.name}",
            Path(found[0]).name if found else None,
            compiler_hint(platform),
            "compiling the runtime",
            required=here,
        )

    return [tool(platform) for platform in dict.fromkeys((host(), *PLATFORMS))]


def open_artifact(artifact: Artifact) -> Runner:
    """The engine itself, over blocks that the caller places."""
    from .native_runner import NativeRunner

    return NativeRunner(artifact)


@register_target("native", tools=tools, open=open_artifact, twin=False)
def convert(program: Program, options: NativeOptions, context: Context) -> Artifact:
    """Write model, manifest, runtime and libraries into `context.out`.

    Raises:
        ConversionError: not a language model of the Llama family, with weight-only INT8 or float weights; or compiling
            failed.
        ToolMissing: there is no compiler for this machine, or for a platform that `libraries` names.
    """
    from edgec.decoder import program_state, read_decoder

    from .native_model import MODEL_FILE, read_draft, write_manifest, write_model

    decoder = read_decoder(program, "native")
    if program.quantization is not None and program.quantization.scheme != "weight-only":
        raise ConversionError(
            f"native: the engine quantises activations itself, and this program has the scheme "
            f"`{program.quantization.scheme}`",
            hint="use `quantize: {scheme: weight-only}`",
            reason=Reason.UNSUPPORTED_SCHEME,
        )
    out = context.out
    context.progress(0, 3, "weights")
    draft = read_draft(program)
    counts = write_model(program_state(program), decoder, draft, out)
    files = [artifact_file(out, MODEL_FILE, "model")]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source := program.companion(name)) is not None:
            (out / name).write_bytes(source.read_bytes())
            files.append(artifact_file(out, name, "tokenizer"))
    context.progress(1, 3, "compiling the runtime")
    files += _libraries(options, context)
    context.progress(2, 3, "runtime sources")
    files += _sources(out)
    write_manifest(out, decoder, draft, options, files)
    files.append(artifact_file(out, "manifest.json", "manifest"))
    details: dict[str, Any] = {
        "shape": decoder.shape,
        "report_libraries": {f.name: f.bytes for f in files if f.role == "library"},
    }
    artifact = Artifact("native", out, tuple(files), program.signatures, counts, details)
    artifact.save()
    return artifact


def _libraries(options: NativeOptions, context: Context) -> list[ArtifactFile]:
    from edgec.runtime.compile import PLATFORMS, build_library, compiler, compiler_hint, host
    from edgec.runtime.library import compiled

    known = {p.name: p for p in (host(), *PLATFORMS)}
    if options.libraries is None:
        wanted = [p for p in known.values() if compiler(p) is not None]
        if host() not in wanted:
            raise ToolMissing(f"native: no C++ compiler for {host().name}", hint=compiler_hint(host()))
        for missing in known.values():
            if missing not in wanted:
                context.note(f"no library for {missing.name}: {compiler_hint(missing)}")
    else:
        if unknown := sorted(set(options.libraries) - set(known)):
            raise ConversionError(
                f"native: unknown platform `{unknown[0]}`",
                hint=f"known: {', '.join(sorted(known))}",
                reason=Reason.BAD_OPTION,
            )
        wanted = [known[name] for name in options.libraries]
    files = []
    for platform in wanted:
        folder = context.out / "lib" / platform.name
        with context.timed(f"compiling for {platform.name}"):
            if platform == host():  # the very library that `edgec run` loads
                folder.mkdir(parents=True)
                path = Path(shutil.copy2(compiled(), folder))
            else:
                path = build_library(folder, platform)
        files.append(artifact_file(context.out, str(path.relative_to(context.out)), "library"))
    return files


def _sources(out: Path) -> list[ArtifactFile]:
    """`runtime/`: what an app compiles for itself, with the header, an example and the wrappers."""
    from edgec.runtime.compile import NATIVE

    for name in ("include", "src", "examples", "bindings"):
        shutil.copytree(NATIVE / name, out / "runtime" / name)
    for name in ("CMakeLists.txt", "README.md"):
        shutil.copyfile(NATIVE / name, out / "runtime" / name)
    return [artifact_file(out, "runtime", "source")]
