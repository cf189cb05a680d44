"""Disks that are full or cannot be written, and surroundings that lack something.

Each ends with one clear message or does not matter, and the same command goes on once the limit is
lifted: a run with the same bits, an export or a file of texts with the same bytes. The disks are
real ones in memory, in a mount namespace of their own; another user is another user; a clock that
jumps is set below the C library.
"""

import contextlib
import hashlib
import json
import mmap
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.flags import quick
from tests.training.campaign import RECIPE, weights

HERE = Path(__file__).parents[1]
LONGEST = 600.0  # seconds, for a command to end
TOGETHER = 8  # cases that are tried at a time
NOBODY = "65534:65534"  # another user
DISK = "size=64m,nr_inodes=4000,mode=755"
KEYS = {
    "train": {"steps": 9, "batch": 8, "evaluate_every": 3},
    "checkpoint": {"every": 2, "keep": 2},
}
SHARES = (0.1, 0.3, 0.6, 0.9)  # of what a command writes, after which a disk is full
HOUR = 3600
CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Seconds by which the clock of the system is off, in a file that others may write meanwhile. */
static int64_t off(void) {
    static volatile int64_t *seconds;
    if (!seconds) {
        int file = open(getenv("CLOCK_OFF"), O_RDONLY);
        seconds = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return *seconds;
}
int clock_gettime(clockid_t which, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, which, now);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) now->tv_sec += off();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


class NotTried(Exception):
    """A limit that cannot be set on this machine, and why."""


class Ended(NamedTuple):
    """End of a command, and its lines on both streams."""

    code: int
    out: list[str]
    err: list[str]

    @property
    def is_quiet(self) -> bool:
        return not any(re.search("Traceback|Warning:", x) for x in [*self.out, *self.err])

    def refuses(self, said: str, code: int = 2) -> bool:
        """Test for one line on the standard error, like this, and an exit code."""
        told = [line for line in self.err if line.strip()]
        return (
            self.is_quiet
            and self.code == code
            and len(told) == 1
            and re.search(said, told[0]) is not None
        )

    @property
    def works(self) -> bool:
        return self.code == 0 and self.is_quiet

    def figures(self) -> dict[str, Any]:
        return {"code": self.code, "said": self.err or self.out[-2:]}


class Bench:
    """A folder with an undisturbed run, and how the program is started in others."""

    def __init__(self, place: Path):
        self.place, self.compiled = place, place / "compiled"
        self.compiled.mkdir()
        self.compiled.chmod(0o777)  # of every user
        origin = self.fresh("undisturbed")
        self.train(origin)
        self.run = origin / "run"
        self.weights = weights(self.run)
        self.export(origin)
        self.generate(origin)
        self.exported, self.texts = digest(origin / "export"), digest(origin / "texts.jsonl")

    def fresh(self, name: str) -> Path:
        """An empty folder with a recipe."""
        here = self.place / name
        here.mkdir()
        (here / "home").mkdir()
        (here / "tiny.yaml").write_text(yaml.safe_dump(RECIPE | KEYS))
        (here / "prompts.jsonl").write_text('{"prompt": "Once"}\n{"prompt": "A dog"}\n')
        return here

    def start(
        self,
        here: Path,
        words: Sequence[str],
        environ: Mapping[str, str | None] | None = None,
        first: str = "",
    ) -> subprocess.Popen:
        """Start the program in other surroundings, `first` by commands of the shell."""
        own = {
            **{"PYTHONPATH": str(HERE), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick()},
            **{"HOME": str(here / "home"), "JAX_COMPILATION_CACHE_DIR": str(self.compiled)},
            **(environ or {}),
        }
        inherited = {x: y for x, y in os.environ.items() if not x.startswith(("JAX_", "WINDLASS"))}
        program = [sys.executable, "-m", "windlass", *words]
        if first:
            program = ["sh", "-ec", f'{first} "$@"', "--", *program]
        return subprocess.Popen(
            program,
            cwd=here,
            env={name: value for name, value in (inherited | own).items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def call(self, here: Path, words: Sequence[str], **how: Any) -> Ended:
        return ended(self.start(here, words, **how))

    def train(self, here: Path, *keys: str, **how: Any) -> Ended:
        return self.call(here, ["train", "tiny.yaml", *(keys or ("run.dir=run",))], **how)

    def export(self, here: Path, to: str = "export", **how: Any) -> Ended:
        return self.call(here, ["export", str(self.run), "--to", to], **how)

    def generate(self, here: Path, out: str = "texts.jsonl", **how: Any) -> Ended:
        words = ["generate", str(self.run), "--file", "prompts.jsonl", "--out", out]
        return self.call(here, [*words, "--tokens", "8", "--temperature", "0"], **how)


def ended(process: subprocess.Popen) -> Ended:
    try:
        out, err = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += b"\nTraceback: none, but it did not end\n"
    lines = (text.decode(errors="replace").splitlines() for text in (out, err))
    return Ended(process.returncode, *lines)


def digest(path: Path) -> dict[str, str]:
    """Hashes of a file, or of all in a folder but what has the time of its making."""
    files = [path] if path.is_file() else sorted(x for x in path.rglob("*") if x.is_file())
    dated = ("README.md", "windlass.json")
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.name not in dated
    }


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[None]:
    """A disk of its own under a folder."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        raise NotTried(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


Limit = Callable[[Path], contextlib.AbstractContextManager[dict[str, Any]]]


def full(left: int = 0) -> Limit:
    """A limit: so many bytes are left on the disk of a folder."""

    @contextlib.contextmanager
    def limited(folder: Path) -> Iterator[dict[str, Any]]:
        ballast = folder / ".ballast"
        about = os.statvfs(folder)
        with ballast.open("wb") as file:
            file.write(bytes(max(0, about.f_bavail * about.f_frsize - left)))
        yield {}
        ballast.unlink()

    return limited


def no_inodes(left: int = 0) -> Limit:
    """A limit: so many more files can be made on the disk of a folder."""

    @contextlib.contextmanager
    def limited(folder: Path) -> Iterator[dict[str, Any]]:
        ballast = folder / ".ballast"
        ballast.mkdir()
        for number in range(os.statvfs(folder).f_ffree - left):
            (ballast / str(number)).touch()
        yield {}
        shutil.rmtree(ballast)

    return limited


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[dict[str, Any]]:
    """A limit: nothing can be written on the disk of a folder."""
    # A program that another case starts has our open files too, for a moment: the disk is in use.
    while subprocess.run(
        ["mount", "-o", "remount,ro", str(folder)], capture_output=True
    ).returncode:
        time.sleep(0.1)
    yield {}
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


@contextlib.contextmanager
def no_permission(folder: Path) -> Iterator[dict[str, Any]]:
    """A limit: the folder is another user's, and the program has no rights of root's."""
    ours = f"{os.getuid()}:{os.getgid()}"
    subprocess.run(["chown", "-R", NOBODY, str(folder)], check=True)
    yield {"first": "exec setpriv --bounding-set=-all --inh-caps=-all"}
    subprocess.run(["chown", "-R", ours, str(folder)], check=True)


class Case(NamedTuple):
    """A limit, and what a command under it says and ends with."""

    name: str
    limit: Limit
    said: str | None  # None: it works as without the limit
    may_work: bool = False  # where it depends on how much it writes before


class Place(NamedTuple):
    """Somewhere that a command writes: `disk` in its folder, a disk under limits."""

    call: Callable[..., Ended]  # of the bench, the folder, and how it is started
    is_right: Callable[[Bench, Path], bool]  # of what is there in the end
    said: str  # before the reason, where it is refused
    full: str = "No space left on device"  # the reason where the disk is full
    prepare: Callable[[Bench, Path], None] = lambda bench, here: None  # what is not there yet
    bytes: int = 0  # that it writes, roughly; for a disk that gets full meanwhile
    inodes: int = 0
    works: Sequence[str] = ()  # limits under which it works

    def cases(self) -> Iterator[Case]:
        """Limits, each reached from where the one before has left the command."""
        plain = {
            "full": (full(), self.full),
            "no inodes": (no_inodes(), "No space left on device"),
            "read-only": (read_only, "Read-only file system"),
            "no permission": (no_permission, "Permission denied"),
        }
        for name, (limit, why) in plain.items():
            said = f"{self.said}.*({why})"
            yield Case(name, limit, None if name in self.works else said)
        for left in (int(share * self.inodes) for share in SHARES[:2] if self.inodes):
            said = f"{self.said}.*No space left on device"
            yield Case(f"no inodes after {left}", no_inodes(left), said, may_work=True)
        for left in (int(share * self.bytes) for share in SHARES if self.bytes):
            said = f"{self.said}.*({self.full})"
            yield Case(f"full after {left:,} bytes", full(left), said, may_work=True)


def train_into(*keys: str, **environ: str) -> Callable[..., Ended]:
    """Training with these keys and variables."""

    def call(bench: Bench, here: Path, **how: Any) -> Ended:
        own = {name: str(here / value) for name, value in environ.items()}
        return bench.train(here, *keys, environ=own, **how)

    return call


def is_trained(place: str) -> Callable[[Bench, Path], bool]:
    return lambda bench, here: weights(here / place) == bench.weights


def interrupted(bench: Bench, here: Path) -> None:
    """A run on the disk, stopped after some steps."""
    if (here / "disk" / "run").exists():
        return
    process = bench.start(here, ["train", "tiny.yaml", "run.dir=disk/run"])
    metrics = here / "disk" / "run" / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and len(metrics.read_bytes().splitlines()) > 3:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.01)
    assert ended(process).code == 143


def copied(bench: Bench, here: Path) -> None:
    """A finished run on the disk."""
    if not (here / "disk" / "run").exists():
        shutil.copytree(bench.run, here / "disk" / "run")


def delete(bench: Bench, here: Path, **how: Any) -> Ended:
    return bench.call(here, ["runs", "--delete", "disk/run", "--yes"], **how)


def generate_compiled(bench: Bench, here: Path, **how: Any) -> Ended:
    """Generation that keeps its compiled programs on the disk."""
    environ = {"WINDLASS_CACHE": str(here / "disk"), "JAX_COMPILATION_CACHE_DIR": None}
    return bench.generate(here, environ=environ, **how)


PLACES = {
    "data cache": Place(
        train_into("run.dir=run", WINDLASS_CACHE="disk"),
        is_trained("run"),
        "prepared data .*disk",
        bytes=300_000,
        inodes=20,
    ),
    "run folder": Place(
        train_into("run.dir=disk/run"),
        is_trained("disk/run"),
        "disk/run",
        bytes=900_000,
        inodes=90,
    ),
    "run folder of a run that goes on": Place(
        train_into("run.dir=disk/run"), is_trained("disk/run"), "disk/run", prepare=interrupted
    ),
    "export": Place(
        lambda bench, here, **how: bench.export(here, "disk/export", **how),
        lambda bench, here: digest(here / "disk" / "export") == bench.exported,
        "disk/export",
        "has .* free; make room there|No space left on device",
        bytes=140_000,
    ),
    "generate --out": Place(
        lambda bench, here, **how: bench.generate(here, "disk/texts.jsonl", **how),
        lambda bench, here: digest(here / "disk" / "texts.jsonl") == bench.texts,
        "--out is disk/texts.jsonl",
        prepare=lambda bench, here: (here / "disk" / "texts.jsonl").unlink(missing_ok=True),
    ),
    "runs --delete": Place(
        delete,
        lambda bench, here: not (here / "disk" / "run").exists(),
        "disk/run cannot be deleted",
        prepare=copied,
        works=("full", "no inodes"),  # a deletion makes room
    ),
    "compile cache": Place(
        generate_compiled,
        lambda bench, here: digest(here / "texts.jsonl") == bench.texts,
        "",
        works=("full", "no inodes", "read-only", "no permission"),
    ),
}


def limited(place: Place) -> Callable[[Bench, Path], dict[str, Any]]:
    """A command under one limit after the other, then without: it ends as if there were none."""

    def case_by_case(bench: Bench, here: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with disk(here / "disk"):
            for case in place.cases():
                place.prepare(bench, here)
                with case.limit(here / "disk") as how:
                    under = place.call(bench, here, **how)
                holds = under.works and (case.may_work or place.is_right(bench, here))
                if case.said is not None:
                    holds = under.refuses(case.said) or (holds and case.may_work)
                found[case.name] = {"holds": holds, "ended": [under.figures()]}
                if under.works and case.may_work:  # the larger ones would have nothing to do
                    after = under
                    break
            else:
                place.prepare(bench, here)
                after = place.call(bench, here)
            is_right = after.works and place.is_right(bench, here)
        lifted = {"holds": is_right, "ended": [after.figures()]}
        return {name: one | {"holds": one["holds"] and is_right} for name, one in found.items()} | {
            "lifted": lifted
        }

    return case_by_case


def one(case: Callable[[Bench, Path], dict[str, Any]]) -> Callable[[Bench, Path], dict[str, Any]]:
    return lambda bench, here: {"": case(bench, here)}


def readers(bench: Bench, here: Path) -> dict[str, Any]:
    """Commands that only read, where nothing can be written and the data is prepared there too."""
    environ = {"WINDLASS_CACHE": str(here / "disk" / "cache")}
    commands = [
        ["evaluate", "disk/run"],
        ["verify", "disk/run"],
        ["runs", "disk/run"],
        ["export", "disk/run", "--to", "export"],
    ]
    with disk(here / "disk"):
        copied(bench, here)
        (here / "disk" / "cache").mkdir()
        first = bench.call(here, ["data", "tiny.yaml"], environ=environ)
        with read_only(here / "disk"):
            outcomes = [bench.call(here, words, environ=environ) for words in commands]
        holds = all(each.works for each in [first, *outcomes])
        holds = holds and digest(here / "export") == bench.exported
    return {"holds": holds, "ended": [each.figures() for each in outcomes]}


def few_files(bench: Bench, here: Path) -> dict[str, Any]:
    """64 open files are enough, with workers and many files of data too."""
    line = json.dumps({"text": "Once upon a time there was a dog. " * 9}) + "\n"
    for number in range(200):
        (here / f"part-{number}.jsonl").write_text(line)
    source = {"source": {"kind": "jsonl", "path": "part-*.jsonl"}}
    (here / "many.yaml").write_text(yaml.safe_dump(RECIPE | {"data": RECIPE["data"] | source}))
    few = "ulimit -n 64; exec"
    outcomes = [
        bench.train(here, "run.dir=run", "data.workers=2", first=few),
        bench.call(here, ["data", "many.yaml"], first=few),
    ]
    holds = all(each.works for each in outcomes) and weights(here / "run") == bench.weights
    return {"holds": holds, "ended": [each.figures() for each in outcomes]}


def apart(setup: str) -> str:
    """Commands that mount something for the program alone."""
    script = f'{setup}\nexec "$@"'
    return f"exec unshare -m sh -ec {shlex.quote(script)} --"


def no_shared_memory(bench: Bench, here: Path) -> dict[str, Any]:
    """Workers need semaphores; without them that is said, and with them the run goes on."""
    words, cases = ["run.dir=run", "data.workers=2"], {"absent": NO_SHM, "read-only": READ_ONLY_SHM}
    outcomes = [bench.train(here, *words, first=apart(setup)) for setup in cases.values()]
    after = bench.train(here, *words)
    is_right = after.works and weights(here / "run") == bench.weights
    said = "^data.workers is 2, and no processes can be started here: .*/dev/shm"
    return {
        name: {"holds": is_right and under.refuses(said), "ended": [under.figures()]}
        for name, under in zip(cases, outcomes, strict=True)
    }


NO_SHM = """
mount -t tmpfs tmpfs home
for name in null zero full random urandom; do
  touch home/$name; mount --bind /dev/$name home/$name
done
mount --move home /dev
"""
READ_ONLY_SHM = "mount -t tmpfs -o ro tmpfs /dev/shm"


NO_USERS = """
echo passwd: files > home/nsswitch
mount --bind home/nsswitch /etc/nsswitch.conf
mount --bind /dev/null /etc/passwd
"""


def no_home(bench: Bench, here: Path) -> dict[str, Any]:
    """Without HOME a user's own folder is taken; one who is in no list of users is told so."""
    none = {"HOME": None}
    listed = bench.generate(here, environ=none)
    under = bench.train(here, environ=none, first=apart(NO_USERS))
    after = bench.train(here)
    holds = listed.works and digest(here / "texts.jsonl") == bench.texts
    holds &= under.refuses("^there is no home folder: HOME is not set")
    holds = holds and after.works and weights(here / "run") == bench.weights
    return {"holds": holds, "ended": [each.figures() for each in (listed, under, after)]}


def plain_locale(bench: Bench, here: Path) -> dict[str, Any]:
    """Texts beyond ASCII are read and written as ever; names beyond it are refused, or work."""
    plain = {"LC_ALL": "C", "LANG": "C"}
    ascii = plain | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    text = json.dumps({"text": "Café ☕ für Zoë. " * 9}, ensure_ascii=False) + "\n"
    for name in ("cafe.jsonl", "café.jsonl"):
        (here / name).write_text(text * 99, encoding="utf-8")
        source = {"source": {"kind": "jsonl", "path": name}}
        recipe = RECIPE | KEYS | {"data": RECIPE["data"] | source}
        content = yaml.safe_dump(recipe, allow_unicode=True)
        (here / name).with_suffix(".yaml").write_text(content, encoding="utf-8")
    shutil.copy(here / "café.yaml", here / "named.yaml")
    prompts = json.dumps({"prompt": "Café ☕"}, ensure_ascii=False)
    (here / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    write = ["--file", "prompts.jsonl", "--tokens", "4", "--temperature", "0", "--out"]
    works = [
        ["data", "cafe.yaml", "--rows", "1"],
        ["train", "tiny.yaml", "run.dir=run"],
        ["runs", "run"],
        ["generate", "run", *write, "ascii.jsonl"],
        ["export", "run", "--to", "export"],
    ]
    refused = {
        "where names are in ascii; PYTHONUTF8=1": ["data", "named.yaml"],
        "not read as UTF-8, .*PYTHONUTF8=1": ["train", "tiny.yaml", "run.dir=café"],
    }
    outcomes = [bench.call(here, words, environ=ascii) for words in works]
    refusals = [bench.call(here, words, environ=ascii) for words in refused.values()]
    after = [bench.call(here, words, environ=plain) for words in refused.values()]
    after.append(bench.call(here, ["generate", str(bench.run), *write, "texts.jsonl"]))
    holds = all(each.works for each in [*outcomes, *after])
    holds &= all(one.refuses(said) for said, one in zip(refused, refusals, strict=True))
    holds = holds and weights(here / "run") == weights(here / "café") == bench.weights
    holds = holds and digest(here / "export") == bench.exported
    holds = holds and digest(here / "ascii.jsonl") == digest(here / "texts.jsonl")
    return {"holds": holds, "ended": [each.figures() for each in [*outcomes, *refusals, *after]]}


def clock(*jumps: int, since: float | None = None) -> Callable[[Bench, Path], dict[str, Any]]:
    """A clock that is set by so many seconds every other step, or that began at another time."""

    def case(bench: Bench, here: Path) -> dict[str, Any]:
        environ = {"CLOCK_OFF": str(here / "off"), "LD_PRELOAD": str(preloaded(here))}
        begin = 0 if since is None else int(since - time.time())
        (here / "off").write_bytes(struct.pack("q", begin))
        process = bench.start(here, ["train", "tiny.yaml", "run.dir=run"], environ=environ)
        metrics, done = here / "run" / "metrics.jsonl", 0
        with (here / "off").open("r+b") as file, mmap.mmap(file.fileno(), 8) as off:
            while process.poll() is None and done < len(jumps):
                if metrics.exists() and len(metrics.read_bytes().splitlines()) > 2 * done:
                    off[:] = struct.pack("q", struct.unpack("q", off)[0] + jumps[done])
                    done += 1
                time.sleep(0.001)
        under = ended(process)
        holds = under.works and not under.err and weights(here / "run") == bench.weights
        began = json.loads((here / "run" / "about.json").read_text())["starts"][0]["began"]
        holds &= done == len(jumps) and began.startswith("1970") == (since is not None)
        return {"holds": holds, "began": began, "ended": [under.figures()]}

    return case


def preloaded(here: Path) -> Path:
    """The library that sets the clock of what loads it, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotTried("there is no C compiler, and the clock is set by a small library in C")
    (here / "clock.c").write_text(CLOCK)
    library = here / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(here / "clock.c")]
    subprocess.run(command, check=True)
    return library


CASES: dict[str, Callable[[Bench, Path], dict[str, Any]]] = {
    **{name: limited(place) for name, place in PLACES.items()},
    "reading on a read-only disk": one(readers),
    "64 open files": one(few_files),
    "/dev/shm": no_shared_memory,
    "no HOME": one(no_home),
    "C locale": one(plain_locale),
    "clock set an hour forward and two back": one(clock(HOUR, -HOUR, -HOUR)),
    "clock at 1970": one(clock(since=0.0)),
}


def campaign(names: Sequence[str] = ()) -> dict[str, Any]:
    """Try all cases, or some."""
    names = names or tuple(CASES)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(TOGETHER) as pool:
        bench = Bench(Path(folder))
        outcomes = list(pool.map(lambda name: tried(bench, name), names))
    found: dict[str, Any] = {}
    for name, cases in zip(names, outcomes, strict=True):
        found |= {f"{name}, {case}".rstrip(", "): figures for case, figures in cases.items()}
    done = {name: case for name, case in found.items() if "not_tried" not in case}
    held = [name for name, case in done.items() if case["holds"]]
    counts = {"tried": len(done), "held": len(held), "not_tried": len(found) - len(done)}
    return {"holds": len(held) == len(found), **counts, "cases": found}


def tried(bench: Bench, name: str) -> dict[str, Any]:
    """The figures of a case, or of each of several."""
    here = bench.fresh(f"{[*CASES].index(name)}")
    try:
        figures = CASES[name](bench, here)
    except NotTried as why:
        figures = {"": {"holds": False, "not_tried": str(why)}}
    text = json.dumps(figures, indent=1, ensure_ascii=False).replace(f"{bench.place}/", "")
    held = sum(case["holds"] for case in figures.values())
    print(f"{name}: {held} of {len(figures)} held", file=sys.stderr, flush=True)
    shutil.rmtree(here)
    return json.loads(text)


def prove() -> dict:
    """Figures of the campaign, in a process that may mount what nobody else sees."""
    with tempfile.TemporaryDirectory() as place:
        own = ["unshare", "-m", "--propagation", "private"]
        is_able = not subprocess.run([*own, "true"], capture_output=True).returncode
        command = [*(own if is_able else ()), sys.executable, "-m", "proofs.limits"]
        environ = os.environ | {"PYTHONPATH": str(HERE)}
        subprocess.run([*command, f"{place}/figures.json"], cwd=place, env=environ, check=True)
        return json.loads(Path(f"{place}/figures.json").read_text())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(campaign(sys.argv[2:])))
