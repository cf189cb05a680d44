"""Public tasks, by lm-evaluation-harness: an adapter from its model interface to ours."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from windlass.config.reading import closest
from windlass.config.sampling import Sampling
from windlass.errors import UserError
from windlass.evaluation.generate import Generator
from windlass.evaluation.likelihood import Scorer

TOKENS = 256  # max new tokens, where a task does not say how many


def measure(
    scorer: Scorer,
    generator: Generator,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    folder: str | Path | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics of each task, and of each group of tasks; a `folder` has tasks of one's own."""
    harness = _library()
    from lm_eval.tasks import TaskManager

    place = None if folder is None else str(Path(folder).expanduser())
    # The tasks that come with the harness are thousands of files, and reading them takes a while.
    manager = TaskManager(include_path=place, include_defaults=place is None)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        meant = closest(unknown[0], manager.all_tasks)
        hint = f"did you mean {meant}? " if meant else ""
        available = "`lm_eval ls tasks` lists them" if place is None else f"{place} has its tasks"
        raise UserError(f"no task is named {unknown[0]}; {hint}{available}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        results = harness.simple_evaluate(
            model=_adapter(scorer, generator),
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    except ConnectionError as wrong:
        raise UserError(
            f"the data of {', '.join(tasks)} comes from the hub, which cannot be reached from here "
            f"({wrong}); where there is a connection the same command keeps it in the cache of the "
            "datasets library, which can be copied here"
        ) from None
    assert results is not None  # only for processes beside the first
    tables = results["results"] | results.get("groups", {})
    return {name: dict(_numbers(values)) for name, values in tables.items()}


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        metric, _, kind = name.partition(",")
        if isinstance(value, int | float) and "_stderr" not in metric and metric != "sample_len":
            yield metric if kind in ("", "none") else f"{metric} ({kind})", float(value)


def _library() -> Any:
    try:
        from lm_eval import evaluator
    except ImportError:
        raise UserError(
            "tasks need lm-evaluation-harness, which is not installed: "
            "pip install 'windlass-lm[harness]'"
        ) from None
    return evaluator


def _adapter(scorer: Scorer, generator: Generator) -> Any:
    """The model as an `LM` of the harness."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    vocabulary = generator.vocabulary

    begin = [] if vocabulary.bos is None else [vocabulary.bos]

    class Adapter(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return vocabulary.eos

        @property
        def prefix_token_id(self) -> int:
            return begin[0] if begin else vocabulary.eos

        def tok_encode(self, string, add_special_tokens=None, **_) -> list[int]:
            text = vocabulary.encode(string).tolist()
            return text if add_special_tokens is False else [*begin, *text]

        def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
            scores = scorer([(context, answer) for _, context, answer in requests])
            return [(one.total, one.is_greedy) for one in scores]

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
            for owner, score in zip(owners, scorer(windows), strict=True):
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
                written |= zip(some, generator.each(starts, sampling, scorer.batch), strict=True)
            return [written[i] for i in range(len(requests))]

    return Adapter()


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    return Sampling(
        temperature=float(settings["temperature"]) if settings["do_sample"] else 0.0,
        top_k=settings.get("top_k"),
        top_p=settings.get("top_p"),
        tokens=int(settings["max_gen_toks"]),
        stop=tuple(end for end in settings["until"] if end),
    )
