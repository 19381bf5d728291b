"""What a reference says: `pypi:NAME==VERSION/path`, `npm:[@scope/]NAME@VERSION/path`, `deb:NAME[=VERSION]/path`,
`hf:org/name[@revision][/path]`, or a local path. The path may hold the wildcards `*`, `?`, `[…]` and `**`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from edgec.errors import Reason, RecipeError

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_VERSION = r"[A-Za-z0-9][A-Za-z0-9._+~!:-]*"
_GRAMMAR = {
    "pypi": (rf"(?P<name>{_NAME})==(?P<version>{_VERSION})(?:/(?P<path>.*))?", "pypi:NAME==VERSION/path"),
    "npm": (rf"(?P<name>(?:@{_NAME}/)?{_NAME})@(?P<version>{_VERSION})(?:/(?P<path>.*))?", "npm:NAME@VERSION/path"),
    "deb": (rf"(?P<name>{_NAME})(?:=(?P<version>{_VERSION}))?(?:/(?P<path>.*))?", "deb:NAME[=VERSION]/path"),
    "hf": (rf"(?P<name>{_NAME}/{_NAME})(?:@(?P<version>{_NAME}))?(?:/(?P<path>.*))?", "hf:org/name[@revision][/path]"),
}


@dataclass(frozen=True)
class Reference:
    """A parsed reference. `kind` is "pypi", "npm", "deb", "hf" or "local"; `version` is "" where none was given."""

    text: str
    kind: str
    name: str
    version: str
    path: str

    @property
    def is_local(self) -> bool:
        return self.kind == "local"

    @property
    def is_glob(self) -> bool:
        return has_wildcard(self.path)

    @property
    def package(self) -> str:
        """The package as its own client names it."""
        joint = {"pypi": "==", "npm": "@", "deb": "=", "hf": "@"}[self.kind]
        return f"{self.name}{joint}{self.version}" if self.version else self.name


def parse_reference(text: str) -> Reference:
    """Parse a reference; anything without a known `kind:` in front is a local path.

    Raises:
        RecipeError: it starts with a known kind, and doesn't follow that kind's grammar.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in _GRAMMAR:
        if re.match(r"^[a-z]{2,10}:(?!//)", text) or "://" in text:
            raise RecipeError(
                f"`{text}` is no kind of reference that edgec knows",
                hint="known: " + ", ".join(form for _, form in _GRAMMAR.values()) + ", or a local path",
                reason=Reason.BAD_RECIPE,
            )
        return Reference(text, "local", "", "", text)
    pattern, form = _GRAMMAR[kind]
    found = re.fullmatch(pattern, rest)
    if found is None:
        raise RecipeError(f"`{text}` is not a {kind} reference", hint=f"write it as `{form}`, with an exact version")
    path = (found["path"] or "").strip("/")
    if ".." in PurePosixPath(path).parts:
        raise RecipeError(f"`{text}` leaves its package", hint="name a path inside the package, without `..`")
    return Reference(text, kind, found["name"], found["version"] or "", path)


def has_wildcard(path: str) -> bool:
    return any(c in path for c in "*?[")


def fixed_prefix(pattern: str) -> str:
    """The folder in front of the first wildcard: `a/b/*.gz` → `a/b`."""
    parts = []
    for part in PurePosixPath(pattern).parts[:-1]:
        if has_wildcard(part):
            break
        parts.append(part)
    return str(PurePosixPath(*parts)) if parts else ""


def wanted(pattern: str) -> re.Pattern[str]:
    """A regular expression for the names a pattern means: one file, all of a folder, or what the wildcards match."""
    if not has_wildcard(pattern):
        return re.compile(f"{re.escape(pattern)}(?:/.*)?" if pattern else ".*", re.DOTALL)
    out, i = "", 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out, i = out + "(?:.*/)?", i + 3
        elif pattern.startswith("**", i):
            out, i = out + ".*", i + 2
        elif pattern[i] == "*":
            out, i = out + "[^/]*", i + 1
        elif pattern[i] == "?":
            out, i = out + "[^/]", i + 1
        elif pattern[i] == "[" and (end := pattern.find("]", i + 2)) > 0:
            body = pattern[i + 1 : end].replace("\\", r"\\")
            out, i = out + "[" + ("^" + body[1:] if body[0] == "!" else body) + "]", end + 1
        else:
            out, i = out + re.escape(pattern[i]), i + 1
    return re.compile(out, re.DOTALL)
