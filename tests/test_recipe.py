"""A recipe is read strictly, and every error says where it is and what was meant."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from edgec.errors import RecipeError, UsageError
from edgec.recipe import Recipe, load_recipe, recipe_schema

TEXT = """\
version: 1
name: tiny
model:
  factory: model.py:tiny
task:
  tensors:
    inputs: {x: [1, 4]}
passes:
  - quantize:
      scheme: static
targets:
  onnxruntime: {}
  tflite: {}
"""


def read(tmp_path: Path, text: str = TEXT, **arguments: object) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load_recipe(path, **arguments)  # type: ignore[arg-type]


def test_a_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    recipe = read(tmp_path)
    assert [p.id for p in recipe.passes] == ["quantize"]
    assert [t.id for t in recipe.targets] == ["onnxruntime", "tflite"]
    assert recipe.resolved()["export"]["opset"] >= 21


@pytest.mark.parametrize(
    ("old", "new", "where", "says"),
    [
        (
            "scheme: static",
            "schem: static",
            ":10:7:",
            "unknown option `schem` of pass `quantize`; did you mean `scheme`?",
        ),
        ("- quantize:", "- quantise:", ":9:5:", "unknown pass `quantise`; did you mean `quantize`?"),
        ("  tflite: {}", "  tflit: {}", ":13:3:", "unknown target `tflit`; did you mean `tflite`?"),
        ("name: tiny", "sed: 0\nname: tiny", ":2:1:", "unknown option `sed` of the recipe; did you mean `seed`?"),
        ("name: tiny", "name: Tiny Model", ":2:1:", "`name`"),
        ("version: 1", "version: 2", ":1:1:", "`version`"),
        ("scheme: static", "scheme: 7", ":10:7:", "`scheme` of pass `quantize`"),
        ("factory: model.py:tiny", "factory: ../model", ":4:3:", "`factory`"),
        ("  tensors:", "  tensor:", ":6:3:", "unknown task `tensor`; did you mean `tensors`?"),
    ],
)
def test_errors_have_a_place_and_a_suggestion(tmp_path: Path, old: str, new: str, where: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, TEXT.replace(old, new))
    assert f"r.yaml{where}" in caught.value.message
    assert says in caught.value.message


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"r\.yaml:\d+:\d+: not valid YAML"):
        read(tmp_path, TEXT + "  bad: [1, 2\n")


def test_a_key_given_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="duplicate key"):
        read(tmp_path, TEXT + "name: again\n")


def test_a_missing_recipe_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="can't read the recipe"):
        load_recipe(tmp_path / "none.yaml")


def test_yaml_cannot_construct_python_objects(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        read(tmp_path, TEXT.replace("name: tiny", "name: !!python/object/apply:os.system ['touch owned']"))
    assert not Path("owned").exists()


def test_set_changes_a_pass_by_its_name(tmp_path: Path) -> None:
    recipe = read(tmp_path, overrides=["seed=7", "passes.quantize.scheme=weight-only", "measure.latency_runs=3"])
    assert recipe.seed == 7
    assert recipe.passes[0].options.scheme == "weight-only"  # type: ignore[attr-defined]
    assert recipe.measure.latency_runs == 3


@pytest.mark.parametrize("override", ["seed", "passes.distil.alpha=1", "name.x=1"])
def test_a_set_that_fits_nothing_is_an_error(tmp_path: Path, override: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        read(tmp_path, overrides=[override])


def test_a_set_is_checked_like_the_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean `seed`"):
        read(tmp_path, overrides=["sead=1"])


def test_an_unknown_target_on_the_command_line_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, targets=["tfl"])
    assert "did you mean `tflite`" in caught.value.message
    assert "onnxruntime" in caught.value.hint


def test_two_spellings_of_one_recipe_have_one_digest(tmp_path: Path) -> None:
    explicit = TEXT.replace("name: tiny", "seed: 0\nname: tiny")
    assert read(tmp_path).digest == read(tmp_path, explicit).digest
    assert read(tmp_path).digest != read(tmp_path, overrides=["seed=1"]).digest


def test_the_published_schema_takes_our_recipes_and_refuses_a_misspelt_key() -> None:
    schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml")):
        data = YAML(typ="safe").load(path.read_text())
        assert list(validator.iter_errors(data)) == [], path.name
        load_recipe(path)
        data["targetz"] = {}
        assert list(validator.iter_errors(data)), path.name
