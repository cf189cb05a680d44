"""Public tasks, by lm-evaluation-harness: an adapter from its model interface to ours."""

import dataclasses
import io
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import yaml
from jinja2 import TemplateError

from windlass import files
from windlass.config.reading import closest
from windlass.config.sampling import Sampling
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.evaluation.generate import Generator
from windlass.evaluation.likelihood import Scorer
from windlass.hub.chat_template import chat_prompt

TOKENS = 256  # max new tokens, where a task does not say how many
SEED = 1234  # of few-shot examples: the default of the harness
RESAMPLED = 1000  # bootstraps of a standard error that has no closed form
END = "\ue000"  # no template writes this by itself


class Score(NamedTuple):
    """A metric of a task, its standard error, and the direction that is better."""

    value: float
    stderr: float | None  # None: it has none
    higher_is_better: bool | None = None  # None: its task does not say

    @property
    def cost(self) -> float:
        """The value, with the sign by which lower is better."""
        return self.value if self.higher_is_better is False else -self.value


class TaskScores(NamedTuple):
    """Scores by task and metric, and the results as the harness itself has them."""

    scores: dict[str, dict[str, Score]]
    results: dict[str, Any]

    @property
    def flat(self) -> dict[str, Score]:
        """Scores by `task/metric`."""
        return {
            f"{task}/{metric}": score
            for task, metrics in self.scores.items()
            for metric, score in metrics.items()
        }


class CutShort(Exception):
    """End of a measurement that was asked to stop."""


class Harness:
    """Tasks with their data, loaded once, to be measured as often as a model changes.

    A `folder` has tasks of one's own. What cannot be loaded is refused here, not at a measurement.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        limit: int | None = None,
        shots: int | None = None,
        folder: str | Path | None = None,
    ):
        self.names, self._limit, self._shots = list(names), limit, shots
        self._library = library()
        from lm_eval.tasks import TaskManager

        place = None if folder is None else str(Path(folder).expanduser())
        if place is not None and not Path(place).is_dir():
            raise UserError(f"there is no folder {place} of tasks")
        # The tasks of the harness are thousands of files, and reading them takes a while.
        manager: Any = TaskManager(include_path=place, include_defaults=place is None)
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            meant = closest(unknown[0], manager.all_tasks)
            hint = f"did you mean {meant}? " if meant else ""
            listed = "`lm_eval ls tasks` lists them" if place is None else f"{place} has its tasks"
            raise UserError(f"no task is named {unknown[0]}; {hint}{listed}")
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._loaded = self._load(manager)

    def _load(self, manager: Any) -> Any:
        try:
            with _apart():
                loaded = manager.load(self.names)
                for task in loaded["tasks"].values():
                    self._settle(task)
                    task.build_all_requests(limit=1, rank=0, world_size=1)  # finds wrong templates
        except ConnectionError as wrong:
            raise UserError(
                f"the data of {', '.join(self.names)} comes from the hub, which cannot be reached "
                f"from here ({wrong}); where there is a connection the same command keeps it in "
                "the cache of the datasets library, which can be copied here"
            ) from None
        except _unusable() as wrong:
            raise UserError(
                f"{', '.join(self.names)} cannot be loaded: {type(wrong).__name__}: {wrong}"
            ) from wrong
        return loaded

    def _settle(self, task: Any) -> None:
        """Set the few-shot examples of a task, as the harness's own command does."""
        own = task.get_config("num_fewshot")
        if own is None or (self._shots is not None and own != 0):  # 0 is meant by its author
            task.set_config(key="num_fewshot", value=self._shots or 0)
        task.set_fewshot_seed(seed=SEED)

    @property
    def metrics(self) -> dict[str, bool | None]:
        """Metrics of the tasks as `task/metric`, and the direction of each that is better."""
        better: dict[str, bool | None] = {}
        for name, task in self._loaded["tasks"].items():
            for filter in task._filters:
                for metric, higher in task.higher_is_better().items():
                    better[f"{name}/{_title(metric, filter.name)}"] = higher
        for name, group in self._loaded["groups"].items():
            below = [one.higher_is_better().items() for one in group.get_all_tasks()]
            known = {metric: higher for items in below for metric, higher in items}
            for one in group.aggregate_metric_list or ():
                kinds = [one.filter_list] if isinstance(one.filter_list, str) else one.filter_list
                for kind in kinds:
                    better[f"{name}/{_title(one.metric, kind)}"] = known.get(one.metric)
        return better

    def __call__(
        self,
        scorer: Scorer,
        generator: Generator,
        *,
        chat: bool = False,
        stops: Callable[[], bool] = lambda: False,
    ) -> TaskScores:
        """Measure a model; with `chat` its template is applied. `CutShort` is raised if it stops.

        Few-shot examples are then turns of the conversation.
        """
        began = time.time()
        for task in self._loaded["tasks"].values():
            self._settle(task)
        with _apart():
            results = self._library.evaluate(
                lm=_adapter(scorer, generator, chat, stops),
                task_dict=self._loaded,
                limit=self._limit,
                bootstrap_iters=RESAMPLED,
                log_samples=False,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
        assert results is not None  # only for processes beside the first
        results |= self._described(generator.vocabulary.template if chat else None, chat)
        results |= {"date": began}
        tables = results["results"] | results.get("groups", {})
        better = results.get("higher_is_better", {})
        scores = {name: dict(_scores(x, better.get(name, {}))) for name, x in tables.items()}
        return TaskScores(scores, results)

    def _described(self, template: str | None, chat: bool) -> dict[str, Any]:
        """The keys that the harness's own command adds to its results."""
        from lm_eval.loggers.evaluation_tracker import GeneralConfigTracker

        tracker = GeneralConfigTracker()
        how: dict[str, Any] = {"system_instruction": None, "fewshot_as_multiturn": chat}
        tracker.log_experiment_args("windlass", {"path": "windlass"}, chat_template=template, **how)
        config = {"model": "windlass", "limit": self._limit, "bootstrap_iters": RESAMPLED}
        config |= {"random_seed": 0, "numpy_seed": SEED, "fewshot_seed": SEED}
        return {"config": config, **dataclasses.asdict(tracker)}


def library() -> Any:
    """The harness, or a refusal that says how it is installed."""
    try:
        from lm_eval import evaluator
    except ImportError:
        raise UserError(
            "tasks need lm-evaluation-harness, which is not installed: "
            "pip install 'windlass-lm[harness]'"
        ) from None
    return evaluator


def write(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the results file of the harness, in place of those that a folder has."""
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(parents=True, exist_ok=True)
    before = list(folder.glob("results_*.json"))
    date = datetime.now().isoformat().replace(":", "-")  # as its own tools read it
    path = folder / f"results_{date}.json"
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    files.write(path, text)
    for one in before:
        one.unlink()
    return path


def uses_chat(format: Any, vocabulary: Vocabulary, chosen: bool | None) -> bool:
    """Use of the chat template: as chosen, or where a model was trained on chats."""
    if chosen is None:
        return format.speaks and vocabulary.template is not None
    if chosen and vocabulary.template is None:
        raise UserError(
            "tasks are to get a chat template, and the tokenizer has none; tasks.chat=false "
            "measures without, and data.format.template names one"
        )
    return chosen


def _scores(
    values: dict[str, Any], better: Mapping[str, bool | None]
) -> Iterator[tuple[str, Score]]:
    for name, value in values.items():
        metric, _, kind = name.partition(",")
        if not isinstance(value, int | float) or "_stderr" in metric or metric == "sample_len":
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        stderr = float(error) if isinstance(error, int | float) else None
        yield _title(metric, kind), Score(float(value), stderr, better.get(metric))


def _title(metric: str, kind: str) -> str:
    """Name of a metric, with that of a filter where there is one."""
    return metric if kind in ("", "none") else f"{metric} ({kind})"


class _Muted(io.TextIOBase):
    """Output stream without the words of the thread that made it; a signal is still answered."""

    def __init__(self, stream: TextIO):
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


@contextmanager
def _apart() -> Iterator[None]:
    """The harness without its bars, and without processes forked beside JAX's threads.

    Its random numbers are those of its own command, and everybody else's are as they were.
    """
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(SEED)
    try:
        with redirect_stdout(_Muted(sys.stdout)), redirect_stderr(_Muted(sys.stderr)):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        os.environ.pop("DISABLE_MULTIPROC")
        os.environ |= {} if before is None else {"DISABLE_MULTIPROC": before}


def _adapter(
    scorer: Scorer,
    generator: Generator,
    chat: bool = False,
    stops: Callable[[], bool] = lambda: False,
) -> Any:
    """The model as an `LM` of the harness."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    vocabulary = generator.vocabulary

    begin = [] if vocabulary.bos is None else [vocabulary.bos]
    # A rendered chat spells out its special tokens.
    encode = vocabulary.read if chat else vocabulary.encode

    def go_on() -> None:
        if stops():
            raise CutShort

    class Windlass(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return vocabulary.eos

        @property
        def prefix_token_id(self) -> int:
            return begin[0] if begin else vocabulary.eos

        @property
        def tokenizer_name(self) -> str:
            return vocabulary.fingerprint[:12]

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return vocabulary.template

        def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
            assert vocabulary.chat is not None
            if add_generation_prompt:
                return chat_prompt(chat_history, vocabulary.chat)
            *before, last = chat_history  # whose words are continued
            last = last | {"content": last["content"] + END}
            return vocabulary.chat.render([*before, last], now=datetime.now()).rpartition(END)[0]

        def tok_encode(self, string, add_special_tokens=None, **_) -> list[int]:
            text = encode(string).tolist()
            has_begun = add_special_tokens is False or text[:1] == begin
            return text if has_begun else [*begin, *text]

        def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
            pairs = [(context, answer) for _, context, answer in requests]
            return [(one.total, one.is_greedy) for one in scorer(pairs, before=go_on)]

        def loglikelihood_rolling(self, requests, disable_tqdm=False) -> list[float]:
            windows, owners = [], []
            for number, request in enumerate(requests):
                tokens = self.tok_encode(request.args[0])
                rolled = utils.get_rolling_token_windows(
                    tokens, self.prefix_token_id, max_seq_len=scorer.longest, context_len=1
                )
                windows += [utils.make_disjoint_window(window) for window in rolled]
                owners += [number] * (len(windows) - len(owners))
            totals = [0.0] * len(requests)
            for owner, score in zip(owners, scorer(windows, before=go_on), strict=True):
                totals[owner] += score.total
            return totals

        def generate_until(self, requests, disable_tqdm=False) -> list[str]:
            written: dict[int, str] = {}
            settings = [normalize_gen_kwargs(request.args[1], TOKENS) for request in requests]
            for kind in (kinds := {str(one): one for one in settings}):
                some = [i for i, one in enumerate(settings) if str(one) == kind]
                sampling = _sampling(kinds[kind])
                room = max(1, scorer.longest - sampling.tokens)
                prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in some]
                starts = [np.array(tokens or [self.prefix_token_id]) for tokens in prompts]
                texts = generator.each(starts, sampling, scorer.batch)
                for i, text in zip(some, texts, strict=True):
                    written[i] = text
                    go_on()
            return [written[i] for i in range(len(requests))]

    return Windlass()


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    return Sampling(
        temperature=float(settings["temperature"]) if settings["do_sample"] else 0.0,
        top_k=settings.get("top_k"),
        top_p=settings.get("top_p"),
        tokens=int(settings["max_gen_toks"]),
        stop=tuple(end for end in settings["until"] if end),
    )


def _unusable() -> tuple[type[Exception], ...]:
    """Errors by which files and functions of tasks, their templates and data are wrong."""
    from datasets.exceptions import DatasetsError

    of_files = (OSError, yaml.YAMLError, TemplateError, DatasetsError)
    of_code = (LookupError, ValueError, TypeError, AttributeError, ImportError, NameError)
    return *of_files, *of_code, SyntaxError, AssertionError, ArithmeticError, RuntimeError
