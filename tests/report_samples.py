"""A build's document as the tests of the report see it: the whole Fashion-MNIST chain, with what can go wrong in it."""

from __future__ import annotations

from edgec.gates import Gates, gate_error, judge
from edgec.parity import compare
from edgec.report.document import (
    BuildDocument,
    ErrorRecord,
    FileRecord,
    GateRecord,
    Latency,
    MetricInfo,
    ParityRecord,
    RecipeInfo,
    StageRecord,
    TableRecord,
    TargetRecord,
    complete,
)

MB = 1_000_000


def stage(name: str, kind: str, size: int, top1: float | None, **more: object) -> StageRecord:
    fields: dict[str, object] = {
        "stage": name,
        "kind": kind,
        "verdict": "changed",
        "bytes": size,
        "parameters": size // 4,
        "metric": top1,
        "metrics": {} if top1 is None else {"top1": top1},
        "seconds": 12.5,
        "peak_memory": 900 * MB,
    }
    return StageRecord.model_validate(fields | more)


def parity(noise: float = 1e-4, step: float | None = 0.02) -> ParityRecord:
    import numpy as np

    generator = np.random.default_rng(0)
    wanted = [{"logits": generator.normal(size=(4, 10)).astype(np.float32)} for _ in range(2)]
    got = [{"logits": w["logits"] + np.float32(noise)} for w in wanted]
    return ParityRecord.of(compare(got, wanted, {"logits": step} if step else {}))


def target(size: int, top1: float, **more: object) -> TargetRecord:
    fields: dict[str, object] = {
        "proven": True,
        "bytes": size,
        "float_bytes": 4 * size,
        "parity": parity(),
        "latency_ms": Latency(p50=0.21, p95=0.3),
        "float_latency_ms": Latency(p50=0.42, p95=0.5),
        "metric": top1,
        "metrics": {"top1": top1},
        "counts": {"ops": 40, "layout_ops": 2, "float_ops": 0, "undelegated_ops": 1, "custom_ops": 0},
        "details": {"report_ops": {"CONV_2D": 12, "ADD": 3}, "report_gpu": {}},
        "files": [FileRecord(name="model.bin", role="model", bytes=size, sha256="ab" * 32)],
    }
    return TargetRecord.model_validate(fields | more)


def sample(gates: dict[str, object] | None = None, **more: object) -> BuildDocument:
    """A build that went well, judged by `gates` (a recipe's section)."""
    document = BuildDocument(
        status="built",
        exit_code=0,
        bundle="out/fashion-mnist",
        seconds=101.0,
        cached_stages=["source"],
        ledger=[
            stage("source", "source", 8 * MB, 0.92, cached=True),
            stage("distill", "pass", 1 * MB, 0.912, metrics={"top1": 0.912, "alone_top1": 0.899}),
            stage(
                "prune",
                "pass",
                MB // 4,
                0.908,
                tables=[
                    TableRecord(title="pruned groups", columns=["group", "kept"], rows=[["conv1", 8], ["conv2", 16]])
                ],
            ),
            stage("quantize", "pass", MB // 16, 0.9075, warnings=["layer `fc` was left in float"]),
            stage("export", "export", MB // 14, None, verdict="unchanged", notes=["opset 21"]),
            stage("tflite", "target", MB // 12, 0.9074, predicted_bytes=MB // 16),
        ],
        targets={
            "onnxruntime": target(MB // 11, 0.9073),
            "tflite": target(MB // 12, 0.9074),
            "coreml": target(
                MB // 10,
                0.9074,
                proven=False,
                proof="evaluated",
                proof_command="edgec diff model.mlpackage program --step 0",
                latency_ms=None,
                float_latency_ms=None,
            ),
        },
        metric=MetricInfo(name="top1", source=0.92),
        source_bytes=8 * MB,
        recipe=RecipeInfo(
            name="fashion-mnist", digest="cd" * 32, task="image-classification", source="model.safetensors"
        ),
        environment={"platform": "Linux x86_64", "cores": "2"},
        tools={"torch": "2.13.0", "onnx": "1.23.2"},
        edgec="0.1.0",
    )
    document = document.model_copy(update=more)
    complete(document)
    verdicts = judge(Gates.model_validate(gates or {}), document)
    document.gates = [GateRecord.of(v) for v in verdicts]
    error = gate_error(verdicts)
    if error is not None:
        document.status, document.exit_code = "failed", int(error.exit_code)
        document.error = ErrorRecord.model_validate(error.to_dict())
    return document
