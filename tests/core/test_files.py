"""Files are written whole or not at all, leave nothing behind, and spare links; one run per folder."""

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading

import pytest

from sparsebp.core import files
from sparsebp.core.errors import FileFormatError, OptionError, OutputError
from sparsebp.core.files import (
    LOCK_NAME,
    hold_folder,
    parse_json,
    prepare_folder,
    read_file,
    remove_temporaries,
    write_atomically,
)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def refused(call, words):
    with pytest.raises(OutputError, match=words) as caught:
        call()
    assert caught.value.expected and caught.value.got
    return caught.value


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 5000])
def test_written_and_replaced(tmp_path, content):
    path = tmp_path / "a.bin"
    write_atomically(path, b"before")
    write_atomically(str(path), content)
    assert path.read_bytes() == content
    assert names(tmp_path) == ["a.bin"]


def test_the_mode_is_the_usual_one(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            write_atomically(tmp_path / "a", b"x")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_names_up_to_the_limit(tmp_path):
    for name in ("n" * 255, "ü" * 127, "语" * 85):
        write_atomically(tmp_path / name, b"x")
        assert (tmp_path / name).read_bytes() == b"x"
    before = names(tmp_path)
    for name in ("n" * 256, "x" * 5000, "a\0b", "\udc00\0", "lone \ud800"):
        refused(lambda name=name: write_atomically(tmp_path / name, b"x"), "cannot be written")
        refused(lambda name=name: prepare_folder(tmp_path / name), "cannot be written")
    assert names(tmp_path) == before


def test_content_name_and_folder_reach_the_disk_in_this_order(tmp_path, monkeypatch):
    """What a power cut leaves depends on the order: content, rename, entry of the folder."""
    path, told = tmp_path / "a.bin", []
    path.write_bytes(b"old")
    content = b"new" * 100_000
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        status = os.fstat(descriptor)
        told.append("folder" if stat.S_ISDIR(status.st_mode) else ("content", status.st_size))
        if stat.S_ISDIR(status.st_mode):
            assert (status.st_dev, status.st_ino) == (tmp_path.stat().st_dev, tmp_path.stat().st_ino)
        else:
            assert path.read_bytes() == b"old"
        fsync(descriptor)

    def noted_replace(source, target):
        told.append("rename")
        assert os.path.dirname(source) == str(tmp_path)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_atomically(path, content)
    assert told == [("content", len(content)), "rename", "folder"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_behind_when_a_call_fails(tmp_path, monkeypatch, call, error):
    write_atomically(tmp_path / "a", b"before")

    def fail(*arguments):
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError if isinstance(error, OSError) else KeyboardInterrupt):
        write_atomically(tmp_path / "a", b"after")
    assert (tmp_path / "a").read_bytes() == b"before"
    assert names(tmp_path) == ["a"]


def test_a_full_disk(tmp_path):
    """A limit on the size of files stands for it: the write itself fails, half-way."""
    write_atomically(tmp_path / "a", b"before")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        refused(lambda: write_atomically(tmp_path / "a", bytes(1_000_000)), "cannot be written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "a").read_bytes() == b"before"
    assert names(tmp_path) == ["a"]


def test_only_regular_files_are_replaced(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = names(tmp_path)
    for name, kind in (("link", "link"), ("dangling", "link"), ("folder", "folder"), ("fifo", "FIFO")):
        assert kind in refused(lambda name=name: write_atomically(tmp_path / name, b"x"), name).got
    assert "device" in refused(lambda: write_atomically("/dev/null", b"x"), "/dev/null").got
    assert names(tmp_path) == before
    assert precious.read_bytes() == b"precious"
    assert (tmp_path / "link").is_symlink()


def test_links_at_names_that_others_may_guess_are_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("a.tmp", ".sparsebp-probe", LOCK_NAME):
        (folder / name).symlink_to(precious)
    write_atomically(folder / "a", b"x")
    prepare_folder(folder)
    with pytest.raises(OutputError), hold_folder(folder):
        pass
    assert precious.read_bytes() == b"precious"


WRITER = """
import sys
from sparsebp.core.files import write_atomically
for i in range(150):
    write_atomically(sys.argv[1], f"{sys.argv[2]} {i} ".encode() * 2000)
"""


def test_two_writers_lose_nothing(tmp_path):
    """Every save succeeds, and every reader finds one of them, whole."""
    path = tmp_path / "a"
    write_atomically(path, b"start 0 " * 2000)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, name]) for name in "ab"]
    while any(writer.poll() is None for writer in writers):
        words = path.read_bytes().split()
        assert len(words) == 4000 and len(set(words[::2])) == len(set(words[1::2])) == 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert path.read_bytes().split()[1] == b"149"
    assert names(tmp_path) == ["a"]


def test_threads_write_one_file(tmp_path):
    errors = []

    def write(name):
        try:
            for _ in range(50):
                write_atomically(tmp_path / "a", name * 10_000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(bytes([65 + i]),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(set((tmp_path / "a").read_bytes())) == 1
    assert names(tmp_path) == ["a"]


def test_a_folder_that_cannot_be_synchronised_is_written_nevertheless(tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    code = errno.EINVAL
    write_atomically(tmp_path / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
    code = errno.EIO  # this is no file system that cannot, but a disk that fails
    refused(lambda: write_atomically(tmp_path / "a", b"y"), "cannot be written")


# ---- the lock of a folder ------------------------------------------------------------------------------------------

HOLDER = """
import sys, pathlib
from sparsebp.core.files import hold_folder
with hold_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_holds_a_folder_until_it_dies(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(OutputError, match="in use by another run") as caught, hold_folder(tmp_path):
        pass
    assert str(holder.pid) in caught.value.got
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert (tmp_path / LOCK_NAME).exists()  # what it left behind keeps nobody out
    with hold_folder(tmp_path):
        pass


def test_a_thread_may_hold_a_folder_twice_and_another_may_not(tmp_path):
    found = []

    def other():
        try:
            with hold_folder(tmp_path):
                found.append("held")
        except OutputError as error:
            found.append(str(os.getpid()) in error.got)

    def ask():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with hold_folder(tmp_path):
        with hold_folder(tmp_path):
            ask()
        ask()  # the inner one has ended, the outer one has not
    ask()
    assert found == [True, True, "held"]


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.fcntl, "flock", fail)
    code = errno.ENOLCK
    with hold_folder(tmp_path):
        pass
    code = errno.EIO
    with pytest.raises(OutputError, match="cannot be written"), hold_folder(tmp_path):
        pass


def test_what_killed_writers_left_is_removed(tmp_path):
    path = tmp_path / "a.bin"
    _, temporary = files._new_file(path)
    _, other = files._new_file(tmp_path / "b.bin")
    path.write_bytes(b"x")
    remove_temporaries(path)
    assert names(tmp_path) == sorted(["a.bin", os.path.basename(other)])
    assert not os.path.exists(temporary)


# ---- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "a\0b", "x" * 300, "x" * 5000, "", "\ud800"])
def test_what_cannot_be_read(tmp_path, name):
    with pytest.raises(FileFormatError, match=r"It is so\. Expected a file\. Got .+\. Do that\.") as caught:
        read_file(tmp_path / name, "It is so", expected="a file", remedy="Do that")
    assert caught.value.got


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "", "{", b"\xff\xfe\x00", "1" * 5000, "[1,]", b"\x00\xd8"]
)
def test_json_that_is_none(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_json():
    value = {"a": [1, 2.5, None, "ü"]}
    assert parse_json(json.dumps(value)) == parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]'])
def test_a_key_twice_is_refused(text):
    with pytest.raises(ValueError, match="the key 'a' twice"):
        parse_json(text)


@pytest.mark.parametrize("call", [prepare_folder, lambda path: write_atomically(path, b"x"),
                                  lambda path: read_file(path, "no", expected="a", remedy="b")])  # fmt: skip
def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"is empty\. Expected the name"):
        call("")
    assert names(tmp_path) == []
