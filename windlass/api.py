"""Python API: each command as one call."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGINT
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from windlass import config
from windlass.checkpoint.verify import VerifyReport
from windlass.config import (
    AnyRecipe,
    Layers,
    Limits,
    Overrides,
    Written,
    json_schema,
    listing,
    read,
    tree,
    words,
)
from windlass.config.reading import report as problem_report
from windlass.config.sections import fields
from windlass.data import Prepared, prepare, reference
from windlass.data.integrity import is_cache
from windlass.data.split import SPLITS
from windlass.data.tokenizer import Tokenizer
from windlass.devices import selection
from windlass.devices.selection import Device
from windlass.errors import UserError
from windlass.evaluation import published_model
from windlass.evaluation.chat import Conversation, Messages, encoded, ends
from windlass.evaluation.finished_run import FinishedRun
from windlass.evaluation.generate import Generator, Prompt
from windlass.evaluation.likelihood import Scorer
from windlass.evaluation.published_model import PublishedModel, open_model, open_on_data
from windlass.evaluation.sampling import Sampling
from windlass.evaluation.verdict import verdict
from windlass.files import writable, write
from windlass.launch import find as find_target
from windlass.launch import preparing, records, running
from windlass.launch.records import Record
from windlass.planning import calibration, limits, matrix, targets, winner
from windlass.planning import prices as costs
from windlass.planning.calibration import Fitted
from windlass.planning.cost import Assumed
from windlass.planning.plan import Plan, PlanRequest, Refused
from windlass.planning.prices import Prices
from windlass.planning.winner import Ranking, Wanted
from windlass.processes.clusters import Hosts
from windlass.processes.signals import Signals
from windlass.program.length import Length
from windlass.release import folder as exports
from windlass.release.export import export
from windlass.reports import run_page
from windlass.reports.comparison import RunComparison
from windlass.reports.run_summary import Account, account
from windlass.run import Run
from windlass.run_folder import folder as folders
from windlass.run_folder import runs as standings
from windlass.run_folder import verify as verifying
from windlass.run_folder.runs import RUNS, Standing, check_deletable, find, is_run
from windlass.starting import frozen_models, origin, tuning
from windlass.telemetry import about as abouts
from windlass.telemetry.about import About
from windlass.telemetry.console import ConsoleReport
from windlass.terminal import Terminal
from windlass.training import loop
from windlass.training.loop import Trained
from windlass.training.session import Evaluator, Session

ANSWER_TOKENS = 512  # at most in an answer, unless a call says otherwise
__all__ = [
    "RUNS",
    "best",
    "chat",
    "Standing",
    "Trained",
    "check_deletable",
    "compare",
    "data",
    "delete",
    "each",
    "evaluate",
    "export",
    "find",
    "generate",
    "is_run",
    "launch",
    "launches",
    "new",
    "plan",
    "plans",
    "prices",
    "recipe",
    "report",
    "runs",
    "schema",
    "standing",
    "stream",
    "subject",
    "tasks",
    "train",
    "verify",
]


def train(
    recipe: AnyRecipe,
    overrides: Overrides = (),
    *,
    hosts: Hosts | None = None,
    signals: Signals | None = None,
    report: ConsoleReport | None = None,
    **keys: Any,
) -> Trained:
    """Train a recipe to its last step, from wherever an earlier call of the same left it.

    Keys are overridden by a list, a mapping, or sections as keywords: `train={"steps": 5}`. After
    Ctrl-C this raises KeyboardInterrupt once the run is saved, and exits after another signal; with
    `signals`, which are the caller's, it returns, and `stopped_by` is the signal. What the run will
    take of its devices is planned before, and kept beside what was measured; where memory runs out,
    the error says what would fit. On several hosts see `training.loop.train`.
    """
    how = {"hosts": hosts, "signals": signals, "report": report}
    trained = loop.train(recipe, words(overrides, keys), **how, plans=True)
    if signals is None and trained.stopped_by is not None:
        if trained.stopped_by != SIGINT:
            raise SystemExit(128 + trained.stopped_by)
        raise KeyboardInterrupt(f"saved {trained.folder} at step {trained.step}; train resumes it")
    return trained


def data(
    recipe: AnyRecipe,
    overrides: Overrides = (),
    *,
    console: Console | None = None,
    **keys: Any,
) -> Prepared:
    """Prepared data of a recipe, as the model will see it: tokenised, split and packed.

    No model is built, and the devices that the recipe requests need not be here.
    """
    layers = origin.load(recipe, words(overrides, keys))
    run = layers.read(Run, _kind(layers))
    prepared = prepare(run.data, run.tokenizer, console=console)
    drawn = None
    if run.train.batch:
        per_epoch = len(prepared.split("train")) // run.train.batch
        drawn = run.train.batch * Length.of(run.train, per_epoch).steps
    return dataclasses.replace(prepared, drawn=drawn)


def plan(
    recipe: AnyRecipe,
    on: str | Sequence[str] | None = None,
    overrides: Overrides = (),
    **how: Any,
) -> Plan | list[Plan | Refused]:
    """Plan of a recipe on devices that need not be here: memory, speed and cost.

    `on` are TPU slices such as v5e-8, GPUs such as h100 or 8xh200, `cpu`, or `here`; by
    default, this machine and a few common targets. `how` is as for `plans`. On one target
    it is a plan; on several a list, with a reason in place of a plan where the recipe cannot be
    laid out.
    """
    results = plans([recipe], on, overrides, **how)
    return results[0] if len(results) == 1 and isinstance(results[0], Plan) else results


def plans(
    recipes: Sequence[AnyRecipe],
    on: str | Sequence[str] | None = None,
    overrides: Overrides = (),
    *,
    each: Sequence[str] = (),
    rows: int | None = None,
    region: str | None = None,
    preemptions: float | None = None,
    compiles: bool = False,
    budget: int | float | None = None,
    within: str | None = None,
    console: Console | None = None,
    **keys: Any,
) -> list[Plan | Refused]:
    """Plans of every recipe on every target, and `each` value of keys: `["train.batch=8,16"]`.

    `rows` is the number of sequences per epoch, where the data is not here; `region` is that of the
    prices, or a provider; `preemptions` are those of a spot machine per hour. What costs more than
    `budget`, in USD, or takes longer than `within`, such as `6h`, is left out. With `compiles` the
    step is compiled for each target whose compiler is here.
    """
    most = _limits(budget, within)
    request = _plan_request(rows, region, preemptions, compiles)
    where = matrix.usual() if on is None else targets.several(on)
    how: dict[str, Any] = {"each": each, "request": request, "console": console}
    results = matrix.plans(recipes, where, words(overrides, keys), **how)
    return limits.enforce(results, most)


def best(
    recipe: AnyRecipe,
    on: str | Sequence[str] | None = None,
    overrides: Overrides = (),
    *,
    wanted: str = "cheapest",
    rows: int | None = None,
    region: str | None = None,
    preemptions: float | None = None,
    compiles: bool = False,
    budget: int | float | None = None,
    within: str | None = None,
    console: Console | None = None,
    tell: Callable[[str], None] = lambda text: None,
    **keys: Any,
) -> Ranking:
    """Search for the settings with which a recipe fits and is fastest, and the best target.

    Microbatch, rematerialisation, mesh and layers per loop are searched, and what a step computes
    stays the same; so do keys among `overrides`. `wanted` is `cheapest` or `fastest`; the rest is
    as for `plans`, and `tell` is called with the progress. Only the result is compiled.
    """
    if wanted not in get_args(Wanted):
        raise UserError(f"best is {wanted}; it must be {listing(get_args(Wanted))}")
    most = _limits(budget, within)
    request = _plan_request(rows, region, preemptions, compiles)
    where = matrix.usual() if on is None else targets.several(on)
    how: dict[str, Any] = {"wanted": wanted, "request": request, "console": console, "tell": tell}
    return winner.find(recipe, where, words(overrides, keys), within=most, **how)


def _plan_request(
    rows: int | None, region: str | None, preemptions: float | None, compiles: bool
) -> PlanRequest:
    if region is not None:  # a typo is reported before anything is planned
        costs.check_place(costs.load(), region)
    return PlanRequest(rows, region, Assumed(preemptions=preemptions), compiles)


def _limits(budget: int | float | None, within: str | None) -> Limits:
    return read(Limits, {"budget": budget, "within": within}, origin="the call")


def calibrate(*names: str | Path) -> list[Fitted]:
    """Fit time estimates to the times of finished runs: these, or all in `runs`."""
    return calibration.calibrate([find(name) for name in names] or standings.within(RUNS))


def recipe(
    model: str | Path,
    data: str | Path,
    overrides: Overrides = (),
    *,
    console: Console | None = None,
    **keys: Any,
) -> Written:
    """Fine-tuning recipe for a model and data, for `train`: what is left open is chosen.

    The model is a folder, a run, or OWNER/NAME of the hub; the data a file, a folder or OWNER/NAME.
    """
    return tuning.chosen(str(model), str(data), words(overrides, keys), console=console)


def new(file: str | Path, base: AnyRecipe = "quickstart") -> Path:
    """Write a recipe to edit, made from another: each key with its meaning, and those left out.

    A file that is there already is left alone.
    """
    place = Path(file).expanduser()
    if place.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file} is no name of a recipe; {place.stem or 'mine'}.yaml would do")
    if place.exists():
        raise UserError(f"{file} is there already, and is left as it is; name another file")
    layers = config.load(base)
    if layers.problems:
        raise UserError(problem_report(list(layers.problems), layers.origin))
    recipe = layers.recipe | ({"by_device": layers.by_device} if layers.by_device else {})
    about = f"# Made from {layers.name}. `windlass train {place.name}` trains it.\n"
    about += "# A line `# key: value` is a key that is left out, with its default.\n\n"
    with writable(place):
        write(place, about + config.commented(recipe, Run))
    return place


def evaluate(
    run: str | Path | None,
    overrides: Overrides = (),
    *,
    split: str = "validation",
    weights: str = "last",
    step: int | None = None,
    data: str | Path | Mapping[str, Any] | None = None,
    console: Console | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Loss and perplexity of a run's newest checkpoint, or of one step, on held-out data.

    In place of a run it may be a model: a folder, an export or OWNER/NAME. `data` then names what
    it is measured on: a run or a recipe whose data it is, a file, a folder or OWNER/NAME. As a
    mapping it is the section of that name, overridden.

    `weights` are those of the `last` step, the `best` (of the lowest validation loss) or their
    average over the steps, `ema`. Where not all tokens are trained on, `over` says what loss and
    perplexity are of. On the test split validation is measured too, with a verdict on
    both, and the run counts the `looks`: each makes it less of a test.
    """
    if split not in SPLITS:
        raise UserError(f"split is {split}; it must be {listing(SPLITS)}")
    if isinstance(data, Mapping):
        keys, data = keys | {"data": data}, None
    opened = open_on_data(run, data, words(overrides, keys), weights=weights, step=step)
    is_run = not isinstance(opened, PublishedModel)
    folder, built = opened.folder, opened.built
    with opened.scope():
        described = built.run
        prepared = prepare(described.data, _tokenizer(folder, described), console=console)
        if split not in prepared.splits:
            has = listing(prepared.splits, "and")
            what = "rows" if described.data.has_blocks else "documents"
            raise UserError(f"{folder} holds out no {split} {what}; it has {has} ones")
        prepared = reference.joined(prepared, folder)
        session = Session(built, prepared)
        splits = [split] if split != "test" else ["validation", "test"]
        reference.check(prepared, folder, splits)
        evaluators = {name: Evaluator(session, name) for name in splits if name in prepared.splits}
        # Other rows in other batches are no other model; other tokens are.
        agreed = ("tokenizer", *map(frozen_models.key, described.helpers))
        identity = {name: session.identity[name] for name in agreed}
        loaded = opened.load(identity=identity)
        loaded = loaded.with_helpers(frozen_models.take(built, prepared.vocabulary)[0])
        reached = loaded.step
        if is_run:
            written = str(loaded.identity.get("data", ""))
            _warn_of_changed_documents(folder, described, prepared, written, console)
        measured = {name: one(*loaded.arguments) for name, one in evaluators.items()}
        answer: dict[str, Any] = {"step": reached, **measured[split]}
        if "perplexity" in answer and prepared.is_weighted:
            answer["over"] = "the tokens that are trained on, each by its weight"
        if split == "test":
            if is_run:
                look = {"step": reached, "weights": weights}
                answer["looks"] = _note_look(folder, described, console, **look)
            if "validation" in measured:
                answer |= {f"validation_{k}": x for k, x in measured["validation"].items()}
                losses = (one.get("cross_entropy", one["loss"]) for one in measured.values())
                known, new = losses
                is_of_tokens = described.objective.unit == "token"
                unigram = prepared.unigram_entropy if is_of_tokens else None
                names = ("test", "validation")
                answer["verdict"] = verdict(new, known, names=names, unigram=unigram)
        return answer


def subject(run: str | Path | None) -> tuple[str, str]:
    """Kind and name of what is evaluated: a run and its folder, or a model."""
    is_run = published_model.find(run) is None
    return ("run", str(find(run))) if is_run else ("model", str(run))


def tasks(
    run: str | Path | None,
    names: str | Sequence[str],
    overrides: Overrides = (),
    *,
    limit: int | None = None,
    shots: int | None = None,
    folder: str | Path | None = None,
    weights: str = "last",
    step: int | None = None,
    batch: int = 8,
    **keys: Any,
) -> dict[str, dict[str, float]]:
    """Scores of a run's model on lm-evaluation-harness tasks; `folder` has one's own tasks.

    At most `limit` examples are measured per task, each after `shots` solved ones.
    """
    from windlass.evaluation import harness

    every = [names] if isinstance(names, str) else names
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        generator = _generator(opened)
        scorer = Scorer(generator.model, longest=opened.context_length, batch=batch)
        how = {"limit": limit, "shots": shots, "folder": folder}
        return harness.measure(scorer, generator, every, **how)


def generate(
    run: str | Path | None,
    prompts: str | Sequence[str | Messages],
    overrides: Overrides = (),
    *,
    chat: bool = False,
    weights: str = "last",
    step: int | None = None,
    batch: int = 16,
    **sampling: Any,
) -> list[str]:
    """Completions of prompts by the model of a run, a folder or the hub.

    A prompt is text to continue, or with `chat` a user message; a list of messages is a chat to
    answer. `sampling` has the fields of `Sampling`, and may have sections of the recipe to
    override, such as `device="cpu"`.
    """
    every = [prompts] if isinstance(prompts, str) else prompts
    how = {"chat": chat, "weights": weights, "step": step, "batch": batch}
    return list(each(run, every, overrides, **how, **sampling))


def each(
    run: str | Path | None,
    prompts: Sequence[str | Messages],
    overrides: Overrides = (),
    *,
    chat: bool = False,
    weights: str = "last",
    step: int | None = None,
    batch: int = 16,
    **sampling: Any,
) -> Iterator[str]:
    """Completions one after the other, as they come, in batches of `batch` prompts."""
    if batch < 1:
        raise UserError(f"batch is {batch}; it must be 1 or more")
    keys, rest = _sections(sampling)
    how = read(Sampling, rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        generator = _generator(opened)
        inputs = [_prompt(prompt, chat, generator, opened.folder) for prompt in prompts]
        yield from generator.each(inputs, how, batch)


def stream(
    run: str | Path | None,
    prompt: str,
    overrides: Overrides = (),
    *,
    weights: str = "last",
    step: int | None = None,
    **sampling: Any,
) -> Iterator[str]:
    """Completion of a prompt by a run's model, streamed in pieces."""
    keys, rest = _sections(sampling)
    how = read(Sampling, rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        yield from _generator(opened).stream(prompt, how)


def chat(
    run: str | Path | None,
    overrides: Overrides = (),
    *,
    system: str | None = None,
    thinking: str = "none",
    weights: str = "last",
    step: int | None = None,
    **sampling: Any,
) -> Conversation:
    """Conversation with the model of a run, a folder or the hub, which remembers it.

    `sampling` has the fields of `Sampling`, by which an answer has at most 512 tokens here.
    """
    keys, rest = _sections(sampling)
    how = read(Sampling, {"tokens": ANSWER_TOKENS} | rest, origin="the call")
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    with opened.scope():
        generator = _generator(opened)
    _check_chats(generator, opened.folder)
    context = {"longest": opened.context_length, "scope": opened.scope}
    return Conversation(generator, how, system=system, thinking=thinking, **context)


def verify(run: str | Path | None) -> VerifyReport | exports.ExportReport:
    """Compare all that a run computes from with its hashes; change nothing.

    That is every file and array of its checkpoints, its recipe and tokenizer, and its prepared
    data. In place of a run it may be an export, or a cache of prepared data.
    """
    place = None if run is None else Path(run).expanduser()
    if place is not None and exports.is_export(place):
        return exports.verify(place)
    if place is not None and is_cache(place):
        return verifying.verify_cache(place)
    return verifying.verify(find(run))


def runs(folder: str | Path = RUNS) -> list[Standing]:
    """Runs in a folder, newest first: step, loss, size and state of each."""
    return [standings.standing(place) for place in standings.within(Path(folder).expanduser())]


def standing(run: str | Path) -> Standing:
    """Step, loss, size and state of one run."""
    return standings.standing(find(run))


def report(run: str | Path | None) -> Account:
    """Report of a run, beside its plan; written to report.html in its folder."""
    summary = account(find(run), costs.load())
    page = summary.standing.folder / folders.REPORT
    with writable(page):
        write(page, run_page.page(summary).encode(errors="replace"))  # half a character of a name
    return summary


def compare(*names: str | Path) -> RunComparison:
    """Comparison of runs: speed, memory, cost, losses after as many steps, and what differs."""
    if len(names) < 2:
        raise UserError("which runs? windlass compare RUN RUN puts two or more side by side")
    catalogue = costs.load()
    return RunComparison([account(find(name), catalogue) for name in names])


def delete(*names: str | Path) -> list[Path]:
    """Delete runs, without confirmation; returns what was in their folders and is not theirs.

    Where one of them is no run, or is being trained, none is deleted.
    """
    places = list(dict.fromkeys(map(find, names)))
    for place in places:
        check_deletable(place)
    return [path for place in places for path in standings.delete(place)]


def launch(
    recipe: AnyRecipe,
    overrides: Overrides = (),
    *,
    on: str,
    to: str = "skypilot",
    dry_run: bool = False,
    **how: Any,
) -> str:
    """Rent a slice and train a recipe there, without confirmation; returns the file for it.

    `how` is the rest of what the command takes: `spot`, `region` or `zone`, `bucket`, `name`,
    `install` and `keep`, and sections to override. With `dry_run` nothing is rented.
    """
    target, (keys, rest) = find_target(to), _sections(how)
    prepared = preparing.prepare(recipe, words(overrides, keys), on=on, **rest)
    target.check(prepared)
    if not dry_run and (code := running.start(prepared, to)):
        raise UserError(
            f"{target.PROGRAM} ended with {code}; `windlass launch --delete {prepared.name}` "
            "deletes what there is"
        )
    return target.write(prepared)


def launches() -> dict[str, Record]:
    """Records of launches that were not deleted, by name."""
    return records.every()


def prices(
    chips: Sequence[str] = (), *, update: str | Path | None = None, reset: bool = False
) -> Prices:
    """Prices of chips, all of them or some: data with a date, and nothing is fetched.

    `update` is a file whose prices are taken from now on; `reset` goes back to those of windlass.
    """
    if update is not None:
        catalogue = costs.update(update)
    else:
        catalogue = costs.reset() if reset else costs.load()
    return catalogue.of([targets.chip(name).slug for name in chips]) if chips else catalogue


def schema() -> dict[str, Any]:
    """JSON schema of a recipe."""
    return json_schema(Run)


def _sections(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of a call that are sections of a recipe, and the others."""
    names = options.keys() & {*fields(Run), "by_device"}
    others = {name: value for name, value in options.items() if name not in names}
    return {name: options[name] for name in options if name in names}, others


def _kind(layers: Layers) -> str | None:
    """Kind of device that decides which keys win; None where none does."""
    device = layers.peek("device", Device) or Device()
    if device.kind != "auto":
        return device.kind
    return selection.choose_here(device).kind if layers.by_device else None


def _tokenizer(folder: Path, run: Run) -> Tokenizer:
    """Tokenizer of a run: what was learned from a corpus is not learned again from another."""
    if run.tokenizer.kind != "bpe":
        return folders.tokenizer(folder, run.tokenizer)
    return Tokenizer(kind="file", path=str(folder / folders.TOKENIZER))


def _warn_of_changed_documents(
    folder: Path, run: Run, prepared: Prepared, written: str, console: Console | None
) -> None:
    """Warn when a run's own documents are no longer those that it was trained on."""
    is_other = _is_other_data(folder, run)
    if not is_other and not written.startswith(prepared.fingerprint[:12]):
        _say(console, f"the documents of {folder} changed since it was trained: these are measured")


def _is_other_data(folder: Path, run: Run) -> bool:
    """Test for other documents than a run's own."""
    stored, ours = folders.stored(folder)["data"], tree(run.data)
    return any(stored.get(name) != ours[name] for name in ("source", "mixture"))


def _note_look(folder: Path, run: Run, console: Console | None, **facts: Any) -> int:
    """Record in a run that its own test split was evaluated; returns how often it has been."""
    about = About(folder / folders.ABOUT)
    if _is_other_data(folder, run):
        return len(abouts.read(about.path, "looks"))
    try:
        return about.looked(**facts)
    except OSError as error:
        _say(console, f"{about.path} cannot be written ({error.strerror}): this look is not noted")
        return 1 + len(abouts.read(about.path, "looks"))


def _generator(opened: FinishedRun) -> Generator:
    if not opened.run.model.causal:
        family = type(opened.run.model).__module__.rpartition(".")[2]
        raise UserError(
            f"{opened.folder} cannot generate: {family}, its family, attends in both directions, "
            "and no token is predicted from those before it; "
            f"`windlass evaluate {opened.folder}` measures its loss"
        )
    if (vocabulary := opened.vocabulary) is None:
        raise UserError(
            f"{opened.folder} was trained on blocks without a vocabulary, so that there is no text "
            f"to generate; `windlass evaluate {opened.folder}` measures its loss"
        )
    return Generator(opened.model(), vocabulary, ends(vocabulary))


def _prompt(prompt: str | Messages, is_chat: bool, generator: Generator, folder: Path) -> Prompt:
    """Prompt as a generator takes it: text, or the tokens of a chat."""
    if isinstance(prompt, str) and not is_chat:
        return prompt
    _check_chats(generator, folder)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return encoded(generator.vocabulary, messages)


def _check_chats(generator: Generator, folder: Path) -> None:
    if generator.vocabulary.chat is None:
        raise UserError(
            f"{folder} has no chat template, since its tokenizer came without one; "
            f'`windlass generate {folder} "..."` continues a text'
        )


def _say(console: Console | None, text: str) -> None:
    console = console or Terminal(stderr=True, soft_wrap=True)
    console.print(Text(text))
