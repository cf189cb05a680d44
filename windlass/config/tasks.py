"""The section of public tasks that are measured while a run trains."""

from windlass.config.every import Every
from windlass.config.sections import section


@section
class Tasks:
    """Tasks of lm-evaluation-harness, measured before the first step, as it trains and at its end.

    The scores are among the metrics of the run, and lm-eval's own results file is in its folder.
    """

    names: tuple[str, ...]  # tasks or groups of tasks, such as [arc_easy, hellaswag]
    # steps, epochs or minutes between two; null: each time that held-out data is evaluated
    every: Every | None = None
    limit: int | None = None  # examples of each task; null: all
    shots: int | None = None  # few-shot examples; null: as many as each task says
    # apply the chat template to prompts; null: where data.format is chat and there is a template
    chat: bool | None = None
    folder: str | None = None  # YAML files of tasks of your own; null: the tasks of the harness

    def __post_init__(self):
        wrong = []
        if isinstance(self.names, str) or not self.names:
            wrong.append(f"names is {self.names or 'empty'}; it is a list of tasks, as [arc_easy]")
        for name, least in (("limit", 1), ("shots", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                wrong.append(f"{name} is {value}; it must be {least} or more")
        if wrong:
            raise ValueError(*wrong)
