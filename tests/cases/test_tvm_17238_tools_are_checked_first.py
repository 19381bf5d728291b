"""tvm#17238: "target.build.llvm is not enabled", after minutes of work.

Here: the plan lists missing tools, and a build stops at once with exit code 4 and the command that installs them. What
TVM itself can compile is probed by `edgec doctor` (tests/test_doctor.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Edgec


def test_the_plan_names_what_is_missing(edgec: Edgec, write_recipe: Callable[..., Path]) -> None:
    done = edgec("plan", write_recipe(("copy: {}", "absent: {}")), "--json")
    assert done.code == 0
    assert [tool["name"] for tool in done.json["missing_tools"]] == ["unobtainium-compiler"]
