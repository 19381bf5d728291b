"""The pages say what is true: reference pages are fresh, and the code and the commands of the prose run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from docs_blocks import DOCS, Command, page_commands, page_files, write_page_files
from ruamel.yaml import YAML

from edgec import docgen
from edgec.cli.main import COMMANDS
from edgec.errors import ExitCode, Reason


def run(command: Command, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = command.words
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", words[0]]
    done = subprocess.run(
        [*program, *words[1:]], cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == command.exit_code, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done


def test_reference_pages_are_fresh() -> None:
    assert docgen.stale(DOCS) == [], "run `python -m edgec.docgen`"


def test_a_stale_or_missing_page_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docgen.main(["--out", str(tmp_path)]) == 0
    assert docgen.main(["--check", "--out", str(tmp_path)]) == 0
    (tmp_path / "gates.md").write_text("old")
    (tmp_path / "tasks.md").unlink()
    assert docgen.main(["--check", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "gates.md" in error and "tasks.md" in error and "passes.md" not in error


def test_every_exit_code_and_reason_has_a_line() -> None:
    page = docgen.exit_codes_page()
    assert set(docgen.EXIT_CODES) == set(ExitCode) and set(docgen.REASONS) == set(Reason)
    assert all(f"| `{reason}` |" in page for reason in Reason)
    assert all(f"| {int(code)} |" in page for code in ExitCode)


@pytest.mark.parametrize("page", ["passes.md", "targets.md", "tasks.md", "gates.md"])
def test_every_option_is_described(page: str) -> None:
    rows = [line for line in docgen.pages()[page].splitlines() if line.startswith("| `")]
    empty = [row for row in rows if row.rstrip().endswith("|  |") and "needed for" not in row]
    assert len(rows) > 5 and empty == []


def test_recipes_fit_the_published_schema() -> None:
    schema = json.loads((DOCS / "recipe.schema.json").read_text())
    recipes = sorted((DOCS.parent / "recipes").glob("*.yaml"))
    assert len(recipes) >= 2
    for path in recipes:
        recipe = YAML(typ="safe").load(path.read_text())
        jsonschema.validate(recipe, schema)
        recipe["gates"] = {**recipe.get("gates", {}), "max_byte": 1}
        with pytest.raises(jsonschema.ValidationError, match="max_byte"):
            jsonschema.validate(recipe, schema)


def test_links_lead_somewhere() -> None:
    broken = []
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in link and not (path.parent / link).exists():
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_commands_in_the_prose_exist() -> None:
    unknown = []
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        code = "\n".join(re.findall(r"`[^`\n]+`|^\s*\$ .*$", path.read_text(), re.MULTILINE))
        for name in re.findall(r"\bedgec ([a-z]+)\b", code):
            if name not in COMMANDS:
                unknown.append(f"{path.name}: edgec {name}")
    assert unknown == []


@pytest.mark.slow
def test_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    write_page_files("tutorial.md", folder)
    environment = {"EDGEC_CACHE": str(tmp_path / "store")}
    outputs = [run(command, folder, environment) for command in page_commands("tutorial.md")]
    assert "max_bytes" in outputs[-1].stderr
    for name in ("bundle/bundle.json", "bundle/edgec.lock", "report.html", "build.json", "junit.xml", "summary.md"):
        assert (folder / "out/tiny-net" / name).is_file()


@pytest.mark.slow
def test_extension_runs_as_it_stands(tmp_path: Path) -> None:
    write_page_files("extending.md", tmp_path)
    # What installing would leave: the package on the path, and its entry points beside it.
    info = tmp_path / "edgec_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: edgec-example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(entry_points(page_files("extending.md"))))
    environment = {"EDGEC_CACHE": str(tmp_path / "store"), "PYTHONPATH": str(tmp_path)}
    built, refused = (run(command, tmp_path, environment) for command in page_commands("extending.md"))
    assert "numpy" in built.stdout and "weights clipped" in built.stderr
    assert "did you mean `deviations`?" in refused.stderr


def entry_points(files: dict[str, str]) -> list[str]:
    """The entry-point sections of the page's pyproject.toml."""
    import tomllib

    groups = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]
    return [
        line for group, names in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]


def test_workflow_is_yaml_whose_commands_exist() -> None:
    [(name, text)] = page_files("ci.md").items()
    assert name == ".github/workflows/edgec.yml"
    workflow = YAML(typ="safe").load(text)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    commands = re.findall(r"\.venv/bin/edgec (\w+)(.*)", "\n".join(step.get("run", "") for step in steps))
    assert {c for c, _ in commands} == {"doctor", "build", "cache"}
    for command, rest in commands:
        help_text = subprocess.run(
            [sys.executable, "-m", "edgec", command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        ).stdout
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in help_text, f"edgec {command} has no {option}"
