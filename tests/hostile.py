"""Hostile inputs, made from a seed: files, names and templates that mean harm, and their trying."""

import contextlib
import copy
import io
import json
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import parquet
from safetensors.numpy import load_file, save_file

from tests import published, tiny, trained
from windlass import seal
from windlass.cli.commands import run
from windlass.errors import UserError
from windlass.hub import config as configs
from windlass.hub import peft, weights
from windlass.hub.chat_template import Template, Unrendered
from windlass.processes.signals import Signals

LONGEST_SECONDS = 30  # of the processor, and four times as many of the clock
SECRET = "hunter2-4f1c9a"  # in the environment and in URLs; nothing may repeat it
MARKER = "executed"  # a file that is there when something was run
SHOWN = "onerror=alert"  # in a page only where it was escaped
ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"
NAMES = (
    "a\nb",
    "a\r\n  kind: evil",
    f"a{ESCAPES}b",
    f"<img src=x {SHOWN}(1)>",
    f'"><script>x.{SHOWN}(1)</script>',
    f"$(touch $HOME/{MARKER})",
    f"`touch $HOME/{MARKER}`",
    f"'; touch $HOME/{MARKER}; '",
    f'" && touch $HOME/{MARKER} && "',
    f"x\nEND\ntouch $HOME/{MARKER}\n",
    f"| touch $HOME/{MARKER} #",
    "${IFS}{a,b}*?[x]~!!",
    "%s%n{0.__class__}{{7*7}}",
    "[/bold][red]:cat:",
    "../../../etc/passwd",
    "-rf",
    "a\x00b",
    "\udce9",
    "x" * 5000,
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        10**9,
        10**30,
        -(10**30),
        1.5,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "x" * 10_000,
        ESCAPES,
        "../../etc/passwd",
        f"$(touch {MARKER})",
        "1",
        "null",
        "\ud800",
    ),
    *([], {}, [[]], [None], {"": ""}, {"a": {"b": [1, {"c": None}]}}, [1] * 1000, ["x", 1, None]),
)
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
RECIPE = {
    "model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS},
    "tokenizer": {"kind": "byte"},
    "data": {"source": {"kind": "jsonl", "path": "rows.jsonl"}, "length": 64},
    "optim": {"kind": "adamw", "learning_rate": 3e-3},
    "train": {"steps": 4, "batch": 8},
    "device": {"kind": "cpu", "count": 1},
}
PIECES = (
    *(
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "for x in range(99999)",
        "endfor",
        "set x = ",
        "x ~ x",
        "x * 9",
        "|",
    ),
    *(
        "join(x)",
        "replace('', x)",
        "center(10 ** 9)",
        "tojson",
        "messages",
        "loop(x)",
        "if x",
        "endif",
    ),
    *(
        "macro f()",
        "endmacro",
        "f()",
        "x.__class__",
        "'x' * 10 ** 9",
        "[x, x]",
        "namespace(x=x)",
        "**",
    ),
)


class Outcome(NamedTuple):
    """End of an input: held, or in what way it did not."""

    kind: str
    number: int
    what: str
    failure: str | None


class Hung(BaseException):
    """Passing of the time that an input may take."""


Try = Callable[[], None]
Made = Iterator[tuple[str, Try]]


class Ground:
    """A folder with a small run and a small model, whose copies are spoilt."""

    def __init__(self, place: Path, run: Path, model: Path):
        self.place, self.run, self.model = place, run, model
        self.config = tiny.config("qwen2")

    def fresh(self, of: Path | None = None) -> Path:
        """An empty folder, or a copy of one."""
        folder = self.place / "input"
        shutil.rmtree(folder, ignore_errors=True)
        if of is None:
            folder.mkdir()
        else:
            shutil.copytree(of, folder)
        os.chdir(folder)
        return folder


def campaign(ground: Ground, seed: int, each: int) -> list[Outcome]:
    """Try `each` inputs of every kind."""
    outcomes = []
    os.environ |= {"HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "HOME": str(ground.place)}
    os.environ["WINDLASS_CACHE"] = str(ground.place / "cache")
    for kind, make in KINDS.items():
        made = make(ground, Random(f"{seed} {kind}"))
        for number in range(each):
            what, attempt = next(made)
            outcomes.append(Outcome(kind, number, what, _failure(ground, attempt)))
    return outcomes


def figures(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts by kind, and the failures."""
    tried = Counter(one.kind for one in outcomes)
    held = Counter(one.kind for one in outcomes if one.failure is None)
    return {
        "tried": len(outcomes),
        "held": sum(held.values()),
        "by_kind": {kind: f"{held[kind]} of {count}" for kind, count in tried.items()},
        "failures": [one._asdict() for one in outcomes if one.failure is not None],
    }


def _failure(ground: Ground, attempt: Try) -> str | None:
    """Failure of an input: a traceback, a hang, something executed, escape codes, a secret."""
    out = io.StringIO()
    numbers = (signal.SIGALRM, signal.SIGPROF)
    before = {number: signal.signal(number, _ring) for number in numbers}
    signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 4 * LONGEST_SECONDS)  # the machine may be busy
    began = time.monotonic()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            attempt()
    except (UserError, Unrendered) as refused:
        if not str(refused).strip():
            return "a refusal without a word"
        out.write(str(refused).encode(errors="replace").decode() if SECRET in str(refused) else "")
    except Hung:
        return f"hung: {time.monotonic() - began:.0f} s"
    except BaseException as error:  # whatever it is, it is what is looked for
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({last.filename}:{last.lineno})"
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.chdir(ground.place)
    return _spoilt(ground, out.getvalue())


def _spoilt(ground: Ground, printed: str) -> str | None:
    if "\x1b" in printed or "\x9b" in printed:
        return "escape codes were printed"
    if SECRET in printed:
        return "a secret was printed"
    for path in ground.place.rglob("*"):
        if path.name == MARKER:
            return "something was executed"
        if path.is_file() and path.suffix not in (".safetensors", ".bin") and path.stat().st_size:
            if "input" in path.parts or "cache" not in path.parts:
                if path.name != "given.yaml" and SECRET.encode() in path.read_bytes():
                    return f"a secret is in {path}"
    return None


def _ring(number: int, frame: Any) -> None:
    raise Hung


def command(*words: str) -> None:
    """A command line, which ends with a code and a message."""
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        code = run(list(words), Signals())
    said = out.getvalue()
    print(said, end="")
    assert code in (0, 1, 2), f"it ended with {code}"
    assert code == 0 or said.strip(), "it failed without a word"
    assert "Traceback" not in said, "it printed a traceback"


def _recipes(ground: Ground, random: Random) -> Made:
    """YAML."""
    write_rows(ground.place / "rows.jsonl")
    bombs = [
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join([f'*{p}'] * 9)}]\n" for p, n in pairwise("abcdefghi")),
        "a: &a {b: *a}\n",
        "a: &a [*a]\n",
        "[" * 4_000,
        "[" * 200_000,
        "{a: " * 5_000,
        "a: " + "[" * 500 + "]" * 500,
        "- " * 3_000,
        "&a " * 2000 + "x",
        "? {a: b}\n: c\n",
        "!!python/object/apply:os.system ['touch executed']\n",
        "!!timestamp x\n",
        "a: !!int x\n",
        "train: {steps: " + "9" * 5000 + "}\n",
        "\0",
        "a: \ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "%YAML 9.9\n---\n",
        "a: b: c: d\n",
        "--- a\n--- b\n",
        "x" * 300_000,
        "".join(f"k{i}: {i}\n" for i in range(9_000)),
        ".".join("a" * 3000) + ": 1\n",
        "<<: *x\n",
    ]
    for number in range(10**9):
        folder = ground.fresh()
        write_rows(folder / "rows.jsonl")
        if number < len(bombs):
            text, what = bombs[number], f"bomb {number}"
        else:
            tree = copy.deepcopy(RECIPE)
            what = _mutated(tree, random)
            text = yaml.safe_dump(tree, allow_unicode=True)
            if random.random() < 0.3:
                text, what = (
                    _scrambled(text.encode(), random).decode("latin-1"),
                    f"{what}, scrambled",
                )
        (folder / "given.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        yield what, lambda: command("data", "given.yaml", "--rows", "1")


def _rows(ground: Ground, random: Random) -> Made:
    """JSON Lines, Parquet and CSV."""
    deep = '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"
    lines = [
        *(deep, '{"text": ' + "9" * 5000 + "}", '{"text": "\\ud800"}', "[]", "null", "{", "", "\0"),
        *(
            '{"text": null}',
            '{"text": {"a": 1}}',
            '{"tex": "x"}',
            '{"text": NaN}',
            '{"text": 1e999}',
        ),
        *('{"messages": [{"role": 1}]}', '{"messages": "[[[["}', '{"messages": ' + "[" * 5000),
        *('{"text": "' + ESCAPES + '"}', '{"' + "k" * 100_000 + '": 1}'),
    ]
    for number in range(10**9):
        folder = ground.fresh()
        keys: list[str] = []
        if number < len(lines):
            (folder / "rows.jsonl").write_text(lines[number], "utf-8", "surrogatepass")
            what = f"line {number}"
        elif number % 3 == 0:
            what = _parquet(folder / "rows.parquet", random)
            keys = ["data.source.kind=parquet", "data.source.path=rows.parquet"]
        elif number % 3 == 1:
            row = {"text": "x", "messages": copy.deepcopy(MESSAGES)}
            what = _mutated(row, random)
            text = json.dumps(row) + "\n" + json.dumps({"text": "y", "messages": MESSAGES})
            (folder / "rows.jsonl").write_text(text)
            if random.random() < 0.5:
                keys = ["data.format=chat", "data.format.template=chatml"]
        else:
            raw = _scrambled(b'a,text\n1,"x\ny"\n2,z\n' * 5, random)
            (folder / "rows.csv").write_bytes(raw)
            what, keys = "csv", ["data.source.kind=csv", "data.source.path=rows.csv"]
        (folder / "given.yaml").write_text(yaml.safe_dump(RECIPE))
        words = ["data", "given.yaml", "--rows", "1", *keys]
        yield what, lambda words=words: command(*words)


def _parquet(file: Path, random: Random) -> str:
    values = random.choice(
        [["x", "y"], [b"\xff\xfe", b"y"], [1, 2], [None, None], [["x"], ["y"]], ["x" * 10**6, ""]]
    )
    parquet.write_table(pa.table({"text": values}), file)
    raw = file.read_bytes()
    if random.random() < 0.8:
        raw = _scrambled(raw, random)
    file.write_bytes(raw)
    return f"parquet of {type(values[0]).__name__}"


def _arrays(ground: Ground, random: Random) -> Made:
    """npy."""
    headers = [
        "{'descr': '<i4', 'fortran_order': False, 'shape': (-5,), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (10**18,), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (999999999999999,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (5,), }",
        "{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (5,), }",
        "{'descr': ('<i4', (2,)), 'fortran_order': False, 'shape': (5,), }",
        "{'descr': '<U9', 'fortran_order': True, 'shape': (5, 5), }",
        "{'descr': 7, 'fortran_order': None, 'shape': 'x', }",
        "{'descr': '<i4', 'shape': (5,)}",
        "__import__('os').system('touch executed')",
        "(" * 5000 + ")" * 5000,
        "{'descr': '<i4', 'fortran_order': False, 'shape': (True,), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3, 4), }",
        "x" * 60_000,
    ]
    for number in range(10**9):
        folder = ground.fresh()
        (folder / "given.yaml").write_text(yaml.safe_dump(RECIPE))
        if number < len(headers):
            text = headers[number].encode()
            size = len(text).to_bytes(2, "little")
            raw = b"\x93NUMPY\x01\x00" + size + text + bytes(80)
            what = f"header {number}"
        else:
            file = io.BytesIO()
            kind = random.choice(
                ["uint16", "int64", "int8", "float32", "complex64", "bool", "uint64"]
            )
            values = np.arange(200).astype(kind)
            np.save(file, -values if number % 5 == 0 and kind != "bool" else values)
            raw, what = _scrambled(file.getvalue(), random), kind
        (folder / "ids.npy").write_bytes(raw)
        keys = ["data.source.kind=npy", "data.source.path=ids.npy", "data.source.eos=0"]
        yield what, lambda keys=keys: command("data", "given.yaml", "--rows", "1", *keys)


def _tokenizers(ground: Ground, random: Random) -> Made:
    """tokenizer.json and the files beside it."""
    whole = json.loads((ground.model / "tokenizer.json").read_text())
    for _ in range(10**9):
        folder = ground.fresh()
        write_rows(folder / "rows.jsonl")
        (folder / "given.yaml").write_text(yaml.safe_dump(RECIPE))
        for name in ("tokenizer_config.json", "generation_config.json"):
            shutil.copy(ground.model / name, folder / name)
        tree = copy.deepcopy(whole)
        which = random.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
        which = "generation_config.json" if random.random() < 0.15 else which
        if which != "tokenizer.json":
            beside = json.loads((folder / which).read_text())
            what = f"{which}: {_mutated(beside, random)}"
            (folder / which).write_text(json.dumps(beside))
        else:
            what = _mutated(tree, random)
        raw = json.dumps(tree).encode()
        if which == "tokenizer.json" and random.random() < 0.2:
            raw, what = _scrambled(raw, random), "scrambled"
        (folder / "tokenizer.json").write_bytes(raw)
        keys = ["tokenizer.kind=file", "tokenizer.path=.", "model.vocab=259"]
        yield what, lambda keys=keys: command("data", "given.yaml", "--rows", "1", *keys)


def _configs(ground: Ground, random: Random) -> Made:
    """config.json of models, and what is built from it."""
    import equinox as eqx
    import jax

    from windlass.config.reading import attempt
    from windlass.run import FAMILIES

    cases = [
        json.loads((ground.model / "config.json").read_text()),
        *(json.loads(trained_config) for trained_config in CONFIGS),
    ]

    def look(folder: Path) -> None:
        values = configs.sections(configs.load(folder), "config.json")["model"]
        family = values.pop("family")
        section, problems = attempt(FAMILIES.load(family), values)
        if problems:
            raise UserError(str(problems))
        eqx.filter_eval_shape(section.init, jax.random.key(0))

    for number in range(10**9):
        folder = ground.fresh()
        config = copy.deepcopy(cases[number % len(cases)])
        what = _mutated(config, random, often=("rope", "layer", "head", "hidden"))
        (folder / "config.json").write_text(json.dumps(config))
        yield f"{config.get('model_type')}: {what}", lambda folder=folder: look(folder)


def _safetensors(ground: Ground, random: Random) -> Made:
    """Safetensors files and their index."""
    model, names = _abstract(ground)

    def look(folder: Path) -> None:
        weights.load(folder, model, names)

    for number in range(10**9):
        folder = ground.fresh(ground.model)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        which = number % 4
        if which == 0:
            file.write_bytes(_scrambled(file.read_bytes(), random))
            what = "scrambled"
        elif which == 1:
            name = random.choice(sorted(tensors))
            new = random.choice(
                [np.zeros((0, 3)), np.zeros(7, "int8"), np.full((2, 2), np.nan), None]
            )
            what = f"{name} is {None if new is None else (new.shape, new.dtype.name)}"
            tensors.pop(name)
            save_file(tensors if new is None else tensors | {name: new}, file)
        elif which == 2:
            index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
            what = f"index: {_mutated(index, random)}"
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            raw = file.read_bytes()
            size = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + size])
            what = f"header: {_mutated(header, random)}"
            text = json.dumps(header).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        yield what, lambda folder=folder: look(folder)


def _adapters(ground: Ground, random: Random) -> Made:
    """Adapters of PEFT."""
    about = {
        **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"},
        **{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": True},
        **{"use_rslora": False, "use_dora": False, "base_model_name_or_path": "x/y"},
    }
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{at}.lora_A.weight": np.zeros((4, 8)), f"{at}.lora_B.weight": np.zeros((8, 4))}
    for number in range(10**9):
        folder = ground.fresh()
        said = copy.deepcopy(about)
        what = _mutated(said, random)
        (folder / "adapter_config.json").write_text(json.dumps(said))
        save_file(tensors, folder / "adapter_model.safetensors")
        if number % 4 == 0:
            file = folder / random.choice(["adapter_model.safetensors", "adapter_config.json"])
            file.write_bytes(_scrambled(file.read_bytes(), random))
            what = f"{file.name} scrambled"
        yield what, lambda folder=folder: _read_adapter(folder)


def _read_adapter(folder: Path) -> None:
    from windlass.config.reading import read
    from windlass.run import ADAPTERS

    stored = peft.read(folder)
    read(ADAPTERS.load(stored.kind), stored.settings)


def _templates(ground: Ground, random: Random) -> Made:
    """Chat templates."""
    from tests.hub.test_template_sandbox import BOMBS

    bombs = list(BOMBS.items())
    for number in range(10**9):
        ground.fresh()
        if number < len(bombs) and number % 2 == 0:
            what, source = bombs[number]
        else:
            source = " ".join(random.choices(PIECES, k=random.randint(3, 30)))
            what = source[:80]
        yield what, lambda source=source: print(Template(source, (), {}).render(MESSAGES)[:100])


def _names(ground: Ground, random: Random) -> Made:
    """Names and values, through generated scripts and pages."""
    for number in range(10**9):
        folder = ground.fresh()
        name = NAMES[number % len(NAMES)]
        turn = number // len(NAMES) % 4
        (folder / "given.yaml").write_text(yaml.safe_dump(RECIPE))
        write_rows(folder / "rows.jsonl")
        if turn == 0:
            yield f"script: {name!r:.60}", lambda name=name: _script(ground, name)
        elif turn == 1:
            yield f"page: {name!r:.60}", lambda name=name: _page(ground, name)
        elif turn == 2:
            words = ["data", name, f"data.source.path={name}", f"run.dir={name}", name]
            yield f"words: {name!r:.60}", lambda words=words: command(*words)
        else:
            words = ["launch", "given.yaml", "--on", "v6e-8", "--bucket", f"gs://{name}"]
            words += ["--name", name, "--dry-run"]
            yield f"launch: {name!r:.60}", lambda words=words: command(*words)


def _script(ground: Ground, name: str) -> None:
    """The setup of a machine is run with stand-ins: words arrive as they are, nothing else runs."""
    from windlass.launch import find
    from windlass.launch.preparing import prepare

    recipe = copy.deepcopy(RECIPE) | {"data": {"source": {"kind": "stories"}, "length": 64}}
    recipe["train"] = recipe["train"] | {"sample": name, "batch": 64}
    recipe.pop("device")
    key = f"train.sample={name}"
    launch = prepare(recipe, [key], on="v6e-8", bucket="gs://mine", install="windlass-lm")
    for target in ("skypilot", "gke", "tpu-vm"):
        find(target).write(launch)
    (task,) = yaml.safe_load_all(find("skypilot").write(launch))
    folder = ground.place / "input"
    programs = {"uv": 'mkdir -p "$HOME/windlass"', "windlass": 'printf "%s\\0" "$@" > words'}
    (folder / "bin").mkdir()
    for program, text in programs.items():
        (folder / "bin" / program).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / program).chmod(0o755)
    environment = {"HOME": str(folder), "PATH": f"{folder}/bin:/usr/bin:/bin"}
    script = task["setup"] + task["run"]
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr
    words = (folder / "launch" / "words").read_bytes().decode().split("\0")
    assert key in words, words


def _page(ground: Ground, name: str) -> None:
    """A run of this name, in a table and on a page."""
    folder = ground.place / "input"
    runs = folder / "runs"
    place = runs / (name.replace("/", "").replace("\0", "")[:100] or "x")
    runs.mkdir()
    shutil.copytree(ground.run, place)
    about = seal.opened(place / "about.json")
    about["starts"][0] |= {"recipe": name, "command_line": {name: name}}
    seal.write_signed(place / "about.json", about)
    command("runs")
    command("runs", str(place))
    command("report", str(place))
    if any("\ud800" <= character <= "\udfff" for character in name):
        return  # refused, as no UTF-8
    text = (place / "report.html").read_text(encoding="utf-8", errors="replace")
    for tag in (f"<img src=x {SHOWN}", f"<script>x.{SHOWN}"):
        assert tag not in text, "a name is HTML on the page"


def _runs(ground: Ground, random: Random) -> Made:
    """Files of a run."""
    for _ in range(10**9):
        folder = ground.fresh(ground.run)
        file = folder / random.choice(["about.json", "metrics.jsonl", "recipe.yaml", "plan.json"])
        what = f"{file.name} scrambled"
        if not file.exists() or random.random() < 0.3:
            file.write_bytes(_scrambled(file.read_bytes() if file.exists() else b"{}", random))
        elif file.suffix == ".yaml":
            tree = yaml.safe_load(file.read_text())
            what = f"{file.name}: {_mutated(tree, random)}"
            file.write_text(yaml.safe_dump(tree, allow_unicode=True), "utf-8", "surrogatepass")
        elif file.suffix == ".jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            what = f"{file.name}: {_mutated(rows, random)}"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            tree = json.loads(file.read_text())
            what = f"{file.name}: {_mutated(tree, random)}"
            file.write_text(json.dumps(tree))
        words = random.choice(
            [["runs", "."], ["runs", ".."], ["report", "."], ["runs", ".", "--json"]]
        )
        yield f"{' '.join(words)}: {what}", lambda words=words: command(*words)


def _urls(ground: Ground, random: Random) -> Made:
    """URLs: with secrets, of protocols that are not there, of no form."""
    urls = [
        f"http://ada:{SECRET}@127.0.0.1:1/rows.jsonl",
        f"https://{SECRET}@127.0.0.1:1/rows.jsonl",
        f"https://127.0.0.1:1/rows.jsonl?token={SECRET}",
        f"simplecache::http://ada:{SECRET}@127.0.0.1:1/rows.jsonl",
        f"s3://key:{SECRET}@bucket/rows.jsonl",
        *(
            "github://x",
            "sftp://",
            "smb://x/y",
            "zip://x",
            "tar://x.tar",
            "git://x",
            "reference://x",
        ),
        *("dask://x", "jupyter://x", "hdfs://x/y", "databricks://x", "libarchive://x", "dbfs://x"),
        *("://", "x://y", "file://", "file:///etc/passwd\0", "http://", "http://[::1", "data:,x"),
        *(
            "data://x",
            "memory://x",
            "local://x",
            "lakefs://x",
            "oci://x",
            "root://x",
            "webhdfs://x",
        ),
        *(
            "blockcache::x",
            "filecache://x",
            "generic://x",
            "http://127.0.0.1:1/*",
            "ftp://127.0.0.1:1/",
        ),
    ]
    for number in range(10**9):
        folder = ground.fresh()
        url = urls[number] if number < len(urls) else random.choice(urls) + random.choice(NAMES)
        (folder / "given.yaml").write_text(yaml.safe_dump(RECIPE))
        keys = [f"data.source.path={url}"]
        if number % 3 == 2:  # in the file
            tree = copy.deepcopy(RECIPE)
            tree["data"]["source"]["path"] = url
            (folder / "given.yaml").write_text(yaml.safe_dump(tree), "utf-8", "surrogatepass")
            keys = []
        what = repr(url.replace(SECRET, "..."))[:80]
        yield what, lambda keys=keys: command("data", "given.yaml", "--rows", "1", *keys)


KINDS: dict[str, Callable[[Ground, Random], Made]] = {
    "recipes": _recipes,
    "rows": _rows,
    "arrays": _arrays,
    "tokenizers": _tokenizers,
    "configs": _configs,
    "safetensors": _safetensors,
    "adapters": _adapters,
    "templates": _templates,
    "names": _names,
    "runs": _runs,
    "urls": _urls,
}
CONFIGS = tuple(
    json.dumps(config)
    for config in json.loads(
        (Path(__file__).parent / "fixtures" / "configs.json").read_text()
    ).values()
)


def ground(place: Path, run: Path) -> Ground:
    """The folder in which inputs are tried, beside a finished run."""
    place.mkdir(parents=True, exist_ok=True)
    return Ground(place, run, published.write(place / "model"))


def write_rows(file: Path) -> None:
    trained.write_corpus(file, 20)


def _abstract(ground: Ground) -> tuple[Any, dict[str, str]]:
    import equinox as eqx
    import jax

    from windlass.models import qwen2

    values = configs.read(configs.load(ground.model), "config.json")
    values.pop("family")
    section = qwen2.Config(**values)
    return eqx.filter_eval_shape(section.init, jax.random.key(0)), qwen2.NAMES


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every key of a tree, with what holds it."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = []
    for key, value in items:
        found.append((tree, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


def _mutated(tree: Any, random: Random, often: tuple[str, ...] = ()) -> str:
    """Spoil a value of a tree, or several."""
    said = []
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = _places(tree)
        named = [one for one in places if isinstance(one[1], str) and one[1].count("_") and often]
        named = [one for one in named if any(word in one[1] for word in often)]
        holder, key = random.choice(
            named if named and random.random() < 0.7 else places or [(tree, "x")]
        )
        if random.random() < 0.15 and isinstance(holder, dict):
            holder.pop(key, None)
            said.append(f"without {key}")
            continue
        value = copy.deepcopy(random.choice(VALUES))
        holder[key] = value
        said.append(f"{key} = {value!r:.40}")
    return "; ".join(said)


def _scrambled(raw: bytes, random: Random) -> bytes:
    """Cut bytes short, flip some, double or remove a part."""
    data = bytearray(raw)
    for _ in range(random.choice([1, 1, 4, 40])):
        match random.randrange(5) if data else 5:
            case 0:
                del data[random.randrange(len(data)) :]
            case 1 | 2:
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            case 3:
                at = random.randrange(len(data))
                data[at:at] = data[at : at + random.randrange(64)]
            case 4:
                at = random.randrange(len(data))
                data[at : at + random.randrange(64)] = b""
    return bytes(data)
