"""Archives: what comes out, and what is refused."""

from __future__ import annotations

import io
import re
import shutil
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from edgec.errors import Reason, SourceError
from edgec.sources import archive
from edgec.sources.archive import extract, member_names
from edgec.sources.reference import wanted

FILES = {"pkg/a.bin": b"alpha", "pkg/sub/b.bin": b"beta", "other/c.bin": b"gamma"}
Make = Callable[[Path, dict[str, bytes]], Path]


def make_zip(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "x.whl"
    with zipfile.ZipFile(path, "w") as out:
        for name, data in files.items():
            out.writestr(name, data)
    return path


def tar_bytes(files: dict[str, bytes], mode: str, *extra: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{mode}") as out:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
        for info in extra:
            out.addfile(info)
    return buffer.getvalue()


def make_tar(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "x.tgz"
    path.write_bytes(tar_bytes(files, "gz"))
    return path


def ar(members: dict[str, bytes]) -> bytes:
    """An ar archive as dpkg-deb writes it."""
    out = b"!<arch>\n"
    for name, data in members.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n"
        out += header.encode() + data + (b"\n" if len(data) % 2 else b"")
    return out


def make_deb(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "x.deb"
    data = tar_bytes({f"./{n}": d for n, d in files.items()}, "xz")
    path.write_bytes(ar({"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data}))
    return path


def make_zstd_deb(folder: Path, files: dict[str, bytes]) -> Path:
    program = shutil.which("zstd")
    if program is None:
        pytest.fail("the tests need zstd: apt-get install zstd")
    plain = tar_bytes({f"./{n}": d for n, d in files.items()}, "")
    packed = subprocess.run([program, "-qc"], input=plain, capture_output=True, check=True).stdout
    path = folder / "x.deb"
    path.write_bytes(ar({"debian-binary": b"2.0\n", "data.tar.zst": packed}))
    return path


@pytest.fixture(params=[make_zip, make_tar, make_deb, make_zstd_deb])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def test_only_the_wanted_members_come_out(make: Make, tmp_path: Path) -> None:
    names = extract(make(tmp_path, FILES), wanted("pkg"), tmp_path / "out")
    assert names == ["pkg/a.bin", "pkg/sub/b.bin"]
    found = {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*.bin")}
    assert found == {n: FILES[n] for n in names}


def test_member_names_are_listed(make: Make, tmp_path: Path) -> None:
    assert member_names(make(tmp_path, FILES)) == sorted(FILES)


@pytest.mark.parametrize("name", ["../escape", "pkg/../../escape", "/etc/escape", "..\\escape", "C:/escape"])
def test_a_member_that_points_outside_refuses_the_archive_even_when_it_is_not_wanted(
    make: Make, tmp_path: Path, name: str
) -> None:
    if make in (make_deb, make_zstd_deb) and name.startswith("/"):
        name = "../escape"  # these write `./` in front
    inner = tmp_path / "inner" / "deep"
    with pytest.raises(SourceError) as caught:
        inner.mkdir(parents=True)
        extract(make(tmp_path, {name: b"evil", **FILES}), wanted("pkg"), inner)
    assert caught.value.reason == Reason.UNSAFE_FILE
    assert not list(tmp_path.rglob("escape"))


def test_the_first_folder_is_stripped_for_npm(tmp_path: Path) -> None:
    path = make_tar(tmp_path, {"package/data/x.txt": b"x", "package/y.txt": b"y"})
    assert extract(path, wanted("data/x.txt"), tmp_path / "out", strip="first") == ["data/x.txt"]
    assert (tmp_path / "out/data/x.txt").read_bytes() == b"x"


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def tar_with(folder: Path, *extra: tarfile.TarInfo) -> Path:
    path = folder / "links.tgz"
    path.write_bytes(tar_bytes(FILES, "gz", *extra))
    return path


def test_a_link_inside_the_archive_becomes_the_file_it_means(tmp_path: Path) -> None:
    path = tar_with(tmp_path, link("pkg/latest", "sub/b.bin"), link("pkg/hard", "pkg/a.bin", tarfile.LNKTYPE))
    extract(path, wanted("pkg"), tmp_path / "out")
    assert (tmp_path / "out/pkg/latest").read_bytes() == b"beta"
    assert (tmp_path / "out/pkg/hard").read_bytes() == b"alpha"
    assert not (tmp_path / "out/pkg/latest").is_symlink()


@pytest.mark.parametrize(
    "bad",
    [
        link("pkg/up", "../../etc/passwd"),
        link("pkg/abs", "/etc/passwd"),
        link("pkg/hard", "../x", tarfile.LNKTYPE),
        link("pkg/dangling", "nowhere"),
        link("pkg/self", "self"),
        link("pkg/dev", "", tarfile.CHRTYPE),
        link("pkg/fifo", "", tarfile.FIFOTYPE),
    ],
    ids=lambda i: i.name,
)
def test_links_that_leave_and_devices_are_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    with pytest.raises(SourceError) as caught:
        extract(tar_with(tmp_path, bad), wanted("pkg"), tmp_path / "out")
    assert caught.value.reason == Reason.UNSAFE_FILE
    assert bad.name in caught.value.message


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as out:
        info = zipfile.ZipInfo("pkg/link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        out.writestr(info, "/etc/passwd")
    with pytest.raises(SourceError) as caught:
        extract(path, wanted("pkg"), tmp_path / "out")
    assert caught.value.reason == Reason.UNSAFE_FILE


@pytest.mark.parametrize("pack", [make_zip, make_tar])
def test_a_bomb_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pack: Make) -> None:
    monkeypatch.setattr(archive, "FLOOR", 2**16)
    path = tmp_path / "bomb"
    if pack is make_zip:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
            out.writestr("pkg/zeros", bytes(2**24))
    else:
        path.write_bytes(tar_bytes({"pkg/zeros": bytes(2**24)}, "gz"))
    with pytest.raises(SourceError, match=r"times its size|claims to hold") as caught:
        extract(path, wanted("pkg"), tmp_path / "out")
    assert caught.value.reason == Reason.UNSAFE_FILE
    assert sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file()) < 2**22


def test_a_truncated_archive_is_damaged_wherever_it_is_cut(make: Make, tmp_path: Path) -> None:
    files = {f"pkg/{i}": bytes(range(256)) * 20 for i in range(3)}
    path = make(tmp_path, files)
    whole = path.read_bytes()
    for share in (0.1, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(SourceError) as caught:
            extract(path, wanted("pkg"), tmp_path / f"out{share}")
        assert caught.value.reason == Reason.BAD_CHECKPOINT, share


def test_garbage_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(SourceError) as caught:
        extract(path, re.compile(".*"), tmp_path / "out")
    assert caught.value.reason == Reason.BAD_CHECKPOINT
