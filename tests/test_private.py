"""Nobody else gets in: where local ranks meet, what listens, and ranks that outlive a launcher."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gems.errors import GemsError, PeerError
from gems.transport import communicators, private
from gems.transport.private import Folder, create, meet, validate
from gems.transport.protocol import Transport
from gems.transport.sockets import open_sockets, strangers
from gems.transport.torch_distributed import TorchDist
from tests.test_cli import SMALL
from tests.worlds import spawn

LIMIT = 60.0


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"gems-{os.geteuid()}"


def test_the_folder_of_a_run_is_for_its_user_alone_and_goes_with_it(base: Path) -> None:
    before = os.umask(0)  # the widest that there is
    try:
        folder = create("launcher")
    finally:
        os.umask(before)
    for path in (base, folder.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    rank = Folder(folder.path, "0")
    folder.leave()
    assert rank.path.exists(), "a rank is still in it"
    rank.leave()
    assert not rank.path.exists()


def test_a_folder_that_others_may_open_is_rejected(base: Path) -> None:
    base.mkdir(mode=0o700)
    base.chmod(0o750)
    with pytest.raises(GemsError, match=r"has mode 0750, not 0700.*join the run.*TMPDIR"):
        create("launcher")


def test_a_link_in_place_of_the_folder_is_rejected(base: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GemsError, match="is not a folder but a link"):
        create("launcher")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_rejected(base: Path) -> None:
    base.mkdir(mode=0o700)
    os.chown(base, 4711, -1)
    with pytest.raises(GemsError, match="belongs to user 4711, not 0"):
        meet("job", 0, 1)


def test_a_folder_that_is_not_there_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(GemsError, match="cannot be opened"):
        validate(tmp_path / "none")


def test_ranks_meet_by_the_name_of_their_job(base: Path) -> None:
    first = meet("job", 0, 1)
    second = meet("job", 1, 1)
    assert first.path == second.path
    with pytest.raises(GemsError, match=r"another run .* set MASTER_PORT"):
        meet("job", 0, 1)
    other = meet("other", 0, 1)
    assert other.path != first.path
    for folder in (first, second, other):
        folder.leave()
    assert [path.name for path in base.iterdir()] == ["lock"]


def test_the_leftovers_of_a_run_that_was_killed_mislead_nobody(base: Path) -> None:
    """Their locks went with their processes."""
    dead = meet("job", 0, 1)
    assert dead.lock is not None
    os.close(dead.lock)
    with pytest.raises(PeerError, match=r"rank 0 has not come within 0.2 seconds"):
        meet("job", 1, 0.2)
    living = meet("job", 0, 1)
    assert meet("job", 1, 1).path == living.path != dead.path
    assert not dead.path.exists()


# --- who is at the other end ----------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_at_the_other_end_is_seen() -> None:
    before = open_sockets().items()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        code = (
            "import encodings.idna, os, socket, sys; os.setuid(4711); s = socket.socket(); "
            "s.connect(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
        )
        port = str(server.getsockname()[1])
        other = subprocess.Popen([sys.executable, "-I", "-c", code, port])
        theirs, _ = server.accept()
        own = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        try:
            opened = dict(open_sockets().items() - before)
            assert len(opened) == 4
            assert strangers(opened) == {4711}
            del opened[theirs.fileno()]
            assert strangers(opened) == set()
        finally:
            for connection in (theirs, ours, own):
                connection.close()
            other.wait()


def invaded(transport: Transport) -> str:
    communicators.strangers = lambda opened: {4711} if opened else set()  # type: ignore[assignment]
    with pytest.raises(PeerError) as caught:
        transport.prepare([(0, 1)], [(0, 1)])
        TorchDist()
    return str(caught.value)


def test_a_rank_does_not_go_on_with_a_process_of_another_user() -> None:
    for said in spawn(2, invaded):
        assert "process of user 4711" in said or "user 4711" in said


# --- a real run -----------------------------------------------------------------------------------

TRAIN = [
    *(sys.executable, "-m", "gems", "train", *SMALL, "--app", "synthetic", "--stages", "2"),
    *("--no-save", "--num-epochs", "100000", "--timeout", "30"),
]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`gems train` on two ranks, that would go on for long; all in a group of their own."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [*TRAIN, "--out", str(tmp_path / "run")],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    yield process
    for pid in [*children(process.pid), process.pid]:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sockets(pid: int) -> list[tuple[str, bool]]:
    """Local address (as the kernel writes it) of each TCP socket, and whether it listens."""
    names = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(os.readlink(fd))
        except OSError:
            continue
    own = {name[8:-1] for name in names if name.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in own:
                found.append((fields[1].partition(":")[0], fields[3] == "0A"))
    return found


def trains(folder: Path) -> bool:
    """Whether steps have been made."""
    journal = folder / "run" / "metrics.jsonl"
    return journal.exists() and journal.read_text().count("\n") > 2


def until(condition: object, folder: Path) -> None:
    late = time.monotonic() + LIMIT
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < late, (folder / "log").read_text()
        time.sleep(0.1)


def test_a_local_run_listens_on_loopback_alone_and_ends_with_its_launcher(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Story: the store listened on all interfaces, and whoever reached it could be a rank."""
    until(lambda: trains(tmp_path), tmp_path)
    ranks = children(launcher.pid)
    assert len(ranks) == 2
    base = tmp_path / f"gems-{os.geteuid()}"
    (folder,) = base.glob("run-*")
    assert stat.S_IMODE(base.stat().st_mode) == stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "store").exists()
    for pid in ranks:
        found = sockets(pid)
        assert any(listens for _, listens in found), "the test must see gloo's own"
        assert {address for address, _ in found} == {"0100007F"}, found  # 127.0.0.1
    launcher.kill()
    launcher.wait()
    until(lambda: not any(map(alive, ranks)), tmp_path)

    def removed() -> bool:
        private._remove_leftover(folder)  # as the next run does, once their last threads are gone
        return not folder.exists()

    until(removed, tmp_path)


def test_ranks_end_with_their_launcher_also_without_prctl(tmp_path: Path) -> None:
    """By the pipe alone, as on systems that are not Linux."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, time, os\n"
        "sys.platform = 'other'\n"
        "from gems.cli.ranks import end_with_launcher\n"
        "end_with_launcher()\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    start = f"from gems.cli.ranks import start; start([{sys.executable!r}, {str(script)!r}], 2)"
    launcher = subprocess.Popen([sys.executable, "-c", start])
    files = [tmp_path / "0", tmp_path / "1"]
    (tmp_path / "log").touch()
    until(lambda: all(f.exists() and f.read_text() for f in files), tmp_path)
    pids = [int(f.read_text()) for f in files]
    assert all(map(alive, pids))
    launcher.kill()
    launcher.wait()
    until(lambda: not any(map(alive, pids)), tmp_path)
